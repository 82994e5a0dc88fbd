"""`picoswarm-doctor FILE_OR_FOLDER`: the doctor of other people's runs, installed by pip.

    pip install ".[doctor]"                   # in a checkout: this, numpy, and no torch

The doctor's files are in the package picoswarm, under world/, and import each other by the names
that they have in the checkout. Importing picoswarm itself would need verifiers (it is an
environment of theirs), so its folder is looked up and not imported. This runs in its own process,
so no other `bookkeeping` or `metrics` is in the way.
"""

import sys
from importlib.util import find_spec
from pathlib import Path


def main() -> None:
    here = Path(find_spec("picoswarm").origin).resolve().parent
    folder = here / "world" if (here / "world").is_dir() else here.parents[1]  # wheel or checkout
    sys.path.insert(0, str(folder))
    try:
        from bookkeeping import doctor
    except ModuleNotFoundError as error:
        raise SystemExit(f'{error}; in a checkout: pip install ".[doctor]"') from None
    doctor.command()


if __name__ == "__main__":
    main()
