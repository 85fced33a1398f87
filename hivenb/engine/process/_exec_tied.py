"""Run as a script: ``_exec_tied.py PARENT_PID SETTINGS PROGRAM ARGUMENTS...`` becomes PROGRAM, tied to PARENT_PID.

SETTINGS are what it finds in its environment beside what is there: ``NAME=VALUE``, with spaces between several.

See :func:`hivenb.engine.process.child.tied_to_parent`. Imports the standard library only, and as little of
it as can be.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    parent_pid, settings, program = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    os.setsid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the death signal was set
        sys.exit(1)
    os.execve(program, sys.argv[3:], os.environ | dict(one.split("=", 1) for one in settings.split()))
