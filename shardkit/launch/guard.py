"""Ends the processes of a launcher that ended without doing so itself: killed by SIGKILL, out of memory, crashed.

A small process of its own, run by its path and without this package. It reads a pipe that the launcher holds open; its
end says that the launcher is gone, however that came. Linux alone could have the kernel do it (PR_SET_PDEATHSIG), but
that must be asked for between fork and exec, which isn't safe in a program with threads, follows the thread that forked
rather than the process, and leaves out what the processes have started in turn.
"""

import contextlib
import os
import signal
import sys


def main() -> None:
    """Reads the numbers of process groups, a line each, and kills those when there are no more lines.

    The word "done" ends it without.
    """
    groups = []
    for line in sys.stdin:
        if line.strip() == "done":
            return
        groups.append(int(line))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
