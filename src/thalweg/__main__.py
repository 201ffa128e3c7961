"""``python -m thalweg`` is the command line."""

from thalweg.cli.main import run

__all__: list[str] = []

if __name__ == "__main__":
    run()
