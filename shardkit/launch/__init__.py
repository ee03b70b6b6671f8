"""Starting a program in several processes, and connecting them: on this machine, or wherever they were started.

``python -m shardkit.launch -n 4 --devices-per-process 2 train.py --steps 10`` runs a script four times, with two
simulated devices each; `run` does the same from Python. In the script, `initialize` connects them.
"""

from shardkit.launch.initialize import initialize
from shardkit.launch.ports import PortTakenError
from shardkit.launch.results import Ended, ProcessFailedError, Result, RunTimeoutError
from shardkit.launch.run import run

__all__ = ["Ended", "PortTakenError", "ProcessFailedError", "Result", "RunTimeoutError", "initialize", "run"]
