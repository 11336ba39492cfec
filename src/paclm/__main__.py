"""`python -m paclm` is the same as `paclm`."""

from paclm.cli.main import main

if __name__ == "__main__":
    main()
