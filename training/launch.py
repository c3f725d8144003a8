"""Starts workers as torchrun does, and takes its arguments:

    python -m training.launch --nproc-per-node 4 -m TASK.train RECIPE [overrides]

torchrun ends every failure with a traceback. Here a user's mistake ends in one line, and Ctrl-C in none. With --elastic
among the overrides workers may come and go: see training/elastic/agent.py.
"""

from __future__ import annotations

import os
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from core.errors import UserError
from training.elastic.agent import run_elastic


def main() -> None:
    os.environ["CO2_LAUNCH"] = "1"  # the workers leave their last line to this process
    args = parse_args(None)
    try:
        if "--elastic" in args.training_script_args:
            sys.exit(run_elastic(args))
        run(args)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        if failure.exitcode != 2:  # of a user's mistake
            raise
        if isinstance(failure.message, dict):  # else it is a mistake in an option, whose text stands above
            print(failure.message["message"], file=sys.stderr, flush=True)
        sys.exit(2)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    except SignalException as signalled:
        sys.exit(128 + signalled.sigval)


if __name__ == "__main__":
    main()
