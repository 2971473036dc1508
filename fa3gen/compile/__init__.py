"""From a module to PTX, cubin and host code, kept in a cache; and the facts that are read from them."""
