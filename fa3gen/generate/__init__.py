"""From a spec to the text of its module, and to what the compiled code has to show."""
