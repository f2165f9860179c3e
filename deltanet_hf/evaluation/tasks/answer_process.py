"""The process in which a program that a model wrote runs: `python -I answer_process.py < PROGRAM`, in an empty folder.

It exits with `PASSED` if the program came to its end. The program may not use the network, start processes, change
files outside its folder, or take more than `MEMORY` bytes. That holds off accidents; it is no sandbox.
"""

import os
import resource
import sys
from typing import Any

PASSED = 17  # a program that leaves by `exit()` has not come to its end
MEMORY = 4 << 30  # bytes of addresses
_REFUSED = (
    *("socket.", "subprocess.", "shutil.", "os.exec", "os.fork", "os.kill", "os.posix_spawn", "os.system"),
    *("os.chmod", "os.chown", "os.link", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.truncate"),
)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def main() -> None:
    """Read a program from standard input, run it, and exit."""
    program, folder = sys.stdin.buffer.read(), os.path.join(os.path.realpath(os.curdir), "")

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        outside = event == "open" and arguments[2] & _WRITES and not os.path.realpath(arguments[0]).startswith(folder)
        if outside or event.startswith(_REFUSED):
            raise PermissionError(f"{event} is refused here")

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    sys.addaudithook(refuse)
    exec(compile(program, "answer", "exec"), {"__name__": "answer"})
    os._exit(PASSED)  # does not wait for threads


if __name__ == "__main__":
    main()
