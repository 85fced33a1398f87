"""Run as a script: ``_exec_tied.py PARENT_PID PROGRAM ARGUMENTS...`` becomes PROGRAM, tied to PARENT_PID.

See :func:`hivenb.engine.process.end_with_parent.tied_to_parent`. Imports the standard library only, and as little of
it as can be.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    parent_pid, program = int(sys.argv[1]), sys.argv[2]
    os.setsid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the death signal was set
        sys.exit(1)
    os.execvp(program, sys.argv[2:])
