"""``python -m shardkit``; and ``python path/to/shardkit doctor``, where ``import shardkit`` itself fails."""

import sys

if not __package__:
    # Run by its path: this folder is where Python looks first, though it holds an `inspect` of its own, and the package
    # isn't imported. That's wanted, as what it imports may be broken; its rooms are found all the same.
    import os
    import types

    here: str = os.path.dirname(os.path.abspath(__file__))
    sys.path[0] = os.path.dirname(here)
    package: types.ModuleType = types.ModuleType("shardkit")
    package.__path__ = [here]
    sys.modules["shardkit"] = package

if __name__ == "__main__":
    from shardkit.cli.main import main

    sys.exit(main())
