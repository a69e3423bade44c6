"""The command `eagle`. Exit status: 0 done, 1 tokens differ or a prompt could not be answered, 2 a fault in what the user gave, 130 interrupted."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module

from eagle_engine.cli.arguments import build_parser
from eagle_engine.errors import EagleError

INTERRUPTED = 130
BROKEN_PIPE = 141  # what a shell reports for a process that SIGPIPE ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    warnings.showwarning = _show_warning
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character shows another
    try:
        args = build_parser().parse_args(argv)
        status = import_module(f"eagle_engine.cli.{args.module}").run(args)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("eagle: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has gone; what is left in the buffer must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except (EagleError, OSError, MemoryError) as error:
        return _fail(str(error) or type(error).__name__)
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        return _fail(f"not enough memory; lower --max-model-len or --batch-size ({str(error).splitlines()[0]})")


def _fail(message: str) -> int:
    print(f"eagle: error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _show_warning(message, category, filename, lineno, file=None, line=None) -> None:
    print(f"eagle: warning: {message}", file=sys.stderr)
