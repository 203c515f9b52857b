"""How a command ends: what a user can cause is told in one line.

    @script
    def main(argv): ...             # raises ValueError or OSError for all that a user can cause

    sys.exit(main())                # 0; 2 and a line on standard error; 130 after Ctrl-C
"""
import contextlib
import ctypes
import io
import os
import re
import signal
import sys
import threading


def note(text):
    """Say in one line what a user should know, but what is no error."""
    print('note:', text, file=sys.stderr)


def aside(text):
    """Print to standard error, beside what is written."""
    print(text, file=sys.stderr)


@contextlib.contextmanager
def of_package(what):
    """Turn whatever a package raises, if it is there, into a ValueError that begins with `what`. Of a broken
    archive, zipfile and gzip raise six kinds of errors. tokenizers raises a plain Exception, or panics in
    Rust: a panic is no Exception, and writes lines of its own to standard error."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError, ImportError):
        raise
    except BaseException as e:      # noqa: BLE001  it raises nothing narrower
        raise ValueError(f'{what} ({str(e) or type(e).__name__})') from None


def keep_memory():
    """Tell glibc to keep freed memory, in pieces of up to 32 MB. Otherwise it returns megabytes to the system
    and fetches them again, with a page fault every 4 KB. That costs up to a third of a layer's time."""
    with contextlib.suppress(OSError, AttributeError, TypeError):       # other systems have no glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(-1, 2 ** 31 - 1)               # M_TRIM_THRESHOLD
        libc.mallopt(-3, 2 ** 25)                   # M_MMAP_THRESHOLD


class Stop:
    """Inside `with Stop() as stop`, a first Ctrl-C or SIGTERM only sets stop.asked, so that what is under way
    can be saved. A second one ends the command at once, as outside. Other threads than the first see none.
    alone: if there are more processes, they would stop apart, so nothing changes"""
    def __init__(self, alone=True):
        self.alone = alone

    def __enter__(self):
        self.asked = False
        self.before = {}
        if self.alone and threading.current_thread() is threading.main_thread():
            for number in signal.SIGINT, signal.SIGTERM:
                self.before[number] = signal.signal(number, self.ask)
        return self

    def ask(self, number, frame):
        self.asked = True
        print('\nstopping after this step, which is saved; again: at once', file=sys.stderr)
        self.__exit__()

    def if_asked(self, why):
        """Stop here, where all is saved, if somebody asked for it."""
        if self.asked:
            raise KeyboardInterrupt(why)

    def __exit__(self, *failure):
        for number, handler in self.before.items():
            signal.signal(number, handler)


def script(main):
    """A script's main(argv) -> exit code: 0; 2 and one line on stderr for an error; 130, 141 if stopped."""
    def run(argv=None):
        keep_memory()
        if sys.stdin is None:                                   # closed
            sys.stdin = open(os.devnull)                        # noqa: SIM115
        for name in 'stdout', 'stderr':
            if getattr(sys, name) is None:                      # closed: the next file would get its number
                setattr(sys, name, open(os.devnull, 'w'))       # noqa: SIM115
            if isinstance(getattr(sys, name), io.TextIOWrapper):
                getattr(sys, name).reconfigure(errors='replace')        # an output may be ASCII only
        try:
            try:
                main(sys.argv[1:] if argv is None else argv)
            finally:
                print(end='', flush=True)                       # here, so that a closed pipe is caught
            return 0
        except KeyboardInterrupt as e:
            print('\nstopped', *e.args, file=sys.stderr)
            return 130
        except BrokenPipeError:                                 # the reader has gone, as with | head
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        except ModuleNotFoundError as e:
            message = f'{e}: pip install {e.name.partition(".")[0]}'
        except (MemoryError, RuntimeError) as e:                # torch's allocators raise a RuntimeError
            message = ('this takes more memory than there is; take fewer or shorter rows, or a smaller '
                       f'model ({e})')
            if isinstance(e, RuntimeError) and not re.search('(out of|allocate|not enough) memory', str(e)):
                raise
        except (ValueError, OSError) as e:
            message = str(e)
            if getattr(e, 'filename', None):
                message = f'{e.filename2 or e.filename}: {e.strerror}'
        print('error:', *message.split(), file=sys.stderr)
        return 2
    return run
