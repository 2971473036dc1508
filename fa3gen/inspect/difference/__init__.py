"""What differs between two specs, or between two revisions of one: fields, plan and generated source, as data.

`pairing` says which modules belong together, `comparing` what differs between two of them, `revisions` gets specs and
modules from git, and `text` puts it all into words. Imports neither torch nor cutlass.
"""
