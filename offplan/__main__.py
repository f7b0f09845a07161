"""``python -m offplan``: the command line where its script is not on the path."""

from offplan.cli.main import main

main()
