"""What every script passes before it imports torch: how the threads of a CPU wait for each other.

A step of a small model is a thousand small parallel regions. At the end of each, a thread spins until the
last one is done. Beside busy programs that one may not be running at all, and the others burn the time that
it needs: beside six of them a step took 20 times as long. So threads spin for some microseconds, then sleep.
A value that is set already stays.
"""
import os

os.environ.setdefault('GOMP_SPINCOUNT', '20000')        # of libgomp: Linux. Turns of a loop
os.environ.setdefault('KMP_BLOCKTIME', '1')             # of LLVM's and Intel's libomp: macOS, Windows. ms
