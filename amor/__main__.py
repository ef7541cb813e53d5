"""`python -m amor` is the same as `amor`."""

from amor.cli import main

raise SystemExit(main())
