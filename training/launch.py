"""Starts workers as torchrun does, with torchrun's arguments:

    python -m training.launch --nproc-per-node 4 -m TASK.train RECIPE [overrides]

torchrun ends every failure with a traceback. This launcher ends a failure with one line, and Ctrl-C with none. With
--elastic among the overrides, workers may come and go: core/elastic/launch.py starts them. With --per_node, several
ranks of a node are then one worker. --resume continues a run after its launcher's end.
"""

import os
import re
import sys
from collections.abc import Sequence

if __name__ == "__main__" and "--elastic" in sys.argv:  # before torch: it prints frames for a lost store
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.run import get_args_parser, run

from core.elastic import launch
from core.elastic.launch import say
from core.errors import UserError
from training.start.script import guard_output


def per_node(options: Sequence[str]) -> int:
    """Returns the number of ranks of each worker from the script's options, which the script itself checks. 0: all."""
    text = re.sub("[ =]+", " ", " ".join(options).replace("--per-node", "--per_node"))
    found = re.findall(r"--per_node (\d+)(?= |$)", text)
    return int(found[-1]) if found else 1


def main() -> None:
    guard_output()
    if "--elastic" in sys.argv:
        sys.exit(launch.main([f"--per-node={per_node(sys.argv)}", *sys.argv[1:]]))
    os.environ["CO2_LAUNCH"] = "1"  # this process prints the workers' last line
    # torchrun's own options, which an older torch ignores: workers save before they end, which takes up to two rounds
    os.environ.setdefault("PET_SHUTDOWN_TIMEOUT", "300")
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
    parser = get_args_parser()
    parser.error = launch.refuse
    for name, usual in (("node_rank", 0), ("master_addr", "127.0.0.1")):
        if parser.get_default(name) == usual:  # check_args refuses several nodes without them
            parser.set_defaults(**{name: None})
    parser.add_argument("--store", help="for --elastic: etcd://HOST,HOST,HOST/RUN, which outlives any one machine")
    try:
        args = parser.parse_args()
        if args.store:
            raise UserError(f"--store {args.store} is for elastic runs: add --elastic to the script's options")
        launch.check_args(args)
        if args.rdzv_backend == "static" and not (args.standalone or args.rdzv_endpoint or args.node_rank):
            launch.check_free(args.master_port or (0 if args.nnodes in ("1", "1:1") else 29500))  # torchrun's; 0: any
        run(args)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode != 2:  # status 2 is a user's mistake
            ended = f"killed by signal {-failure.exitcode}" if failure.exitcode < 0 else "first to fail"
            say(f"error: worker {rank} was {ended}: see what the workers print")
            sys.exit(1)
        if isinstance(failure.message, dict):  # otherwise the message about a wrong option was printed above
            say(failure.message["message"])
        sys.exit(2)
    except RendezvousError as error:
        say(f"error: --rdzv-endpoint {args.rdzv_endpoint}: {error}: start the first node's launcher, with a free port")
        sys.exit(2)
    except (UserError, RuntimeError, ValueError, OSError, AssertionError) as error:  # of this process, not of workers
        say(f"error: {(str(error).splitlines() or ['torchrun refuses the options'])[0]}")
        sys.exit(2)
    except SignalException as signalled:
        sys.exit(128 + signalled.sigval)


if __name__ == "__main__":
    main()
