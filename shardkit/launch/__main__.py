"""``python -m shardkit.launch -n 4 --devices-per-process 2 train.py --steps 10``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from shardkit.launch.ports import PortTakenError
from shardkit.launch.run import FAILURE_GRACE, SIGNAL_GRACE, run

_PROGRAM = "python -m shardkit.launch"


def parser() -> argparse.ArgumentParser:
    """The options; what comes after the script is the script's."""
    made = argparse.ArgumentParser(
        _PROGRAM,
        usage=f"{_PROGRAM} [-n N] [--devices-per-process N] [options] (script.py | -m module) [arguments ...]",
        description="Runs a Python program in several processes of this machine. In it, sk.initialize() connects them.",
        allow_abbrev=False,
    )
    made.add_argument("-n", "--processes", type=int, default=2, metavar="N", help="how many processes (2)")
    made.add_argument(
        "--devices-per-process",
        type=int,
        metavar="N",
        help="simulated CPU devices of each; else the devices that it finds, of several GPUs one each",
    )
    made.add_argument(
        "--port", type=int, help="of the coordinator, process 0, on 127.0.0.1; else one that's free is chosen"
    )
    made.add_argument(
        "--grace",
        type=float,
        metavar="SECONDS",
        help="from SIGTERM to SIGKILL, when processes are stopped: after the failure of one "
        f"({FAILURE_GRACE:g}), or SIGINT or SIGTERM to this program, which are forwarded ({SIGNAL_GRACE:g})",
    )
    made.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="module", help="a module, as python -m")
    made.add_argument("script", nargs=argparse.REMAINDER, help="and its arguments")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program.

    Args:
      argv: the words after the launcher's name. None: those of this process.

    Returns:
      The exit status: that of the process that failed first, 128 and the number of the signal that ended it, or 0.
    """
    options = parser()
    args = options.parse_args(argv)
    script = args.script[1:] if args.script[:1] == ["--"] else args.script
    if args.module:
        command = [sys.executable, "-m", *args.module]
    elif not script:
        options.error("give a script, or -m and a module")
    elif not os.path.exists(script[0]):
        options.error(f"there's no script {script[0]!r}")
    else:
        command = [sys.executable, *script]
    if args.grace is not None and args.grace < 0:
        options.error(f"--grace takes seconds, 0 or more; got {args.grace:g}")
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        result = run(
            command,
            args.processes,
            args.devices_per_process,
            port=args.port,
            grace=args.grace,
            forward_signals=True,
        )
    except (ValueError, PortTakenError) as error:
        options.error(getattr(error, "strerror", None) or str(error))
    except BrokenPipeError:  # nobody reads any more, as after `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    if result.status:
        sys.stderr.write(f"{_PROGRAM}: {result.summary()}; none is left\n")
    if result.warning:
        sys.stderr.write(f"{_PROGRAM}: {result.warning}\n")
    return result.status


if __name__ == "__main__":
    sys.exit(main())
