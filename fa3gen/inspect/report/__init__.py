"""The report of one module: everything that fa3gen knows of it, first as data, then as one self-contained HTML page.

`swizzles`, `fragments`, `tiles`, `liveness`, `listing`, `numerics` and `speeds` hold the data, `drawing` and `pictures`
make SVG of it, `page` puts them together.
"""
