"""`python -m fa3gen` is `fa3gen`."""

from fa3gen.cli import main

raise SystemExit(main())
