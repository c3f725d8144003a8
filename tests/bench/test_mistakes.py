"""A user's mistake with a command of bench is one line on stderr that names the value and the remedy, and status 2."""

from pathlib import Path

import pytest

from tests.scripts import Mistakes

# a case a line: the command, and what it says. FOLDER holds measurements
CASES = """
bench.boundary --sizes 0 => sizes=(0.0,): give one or more numbers
bench.boundary --repeats 0 => repeats=0: give 1 or more
bench.boundary --threads -1 => threads=-1: give a number of threads, or 0
bench.cluster --rate 200 -- x => rate='200': give a number and one of kbit, mbit, gbit
bench.cluster --rate 200MB -- x => rate='200MB'
bench.cluster --rate -1mbit -- x => rate='-1mbit'
bench.cluster --rate 0mbit -- x => more than 0
bench.cluster --rate 1mbit --delay 5 -- x => delay='5': give a number and one of us, ms, s
bench.cluster --rate 1mbit --nodes 0 -- x => nodes=0
bench.cluster --rate 1mbit --ranks-per-node 0 -- x => ranks_per_node=0
bench.cluster --rate 1mbit --nodes 1 --verify -- x => 2 or more
bench.cluster --rate 1mbit --nics 0 -- x => nics=0
bench.cluster --rate 1mbit => no command
bench.cluster --rate 1mbit -- => no command
bench.gpu --device cpu --checks birds => checks=birds: no measurement of costs, loops has that name
bench.scaling --workers 0 => workers=0: give a number above 0
bench.scaling --workers 2 99999 => workers=99999: give up to 1024, for each is a process on this machine
bench.scaling --rates 200 200 => rates=200.0 200.0: give one or more, each once
bench.scaling --seconds inf => seconds=inf: give a number above 0
bench.scaling --methods co2 => methods: 'co2': ddp has no tau
bench.scaling --throttle --out FOLDER => holds a measurement: choose another --out
bench.lengths --workers 1 => give 2 workers
bench.lengths --rounds 0 => rounds=0
bench.lengths --seeds 1 1 => seeds=1 1
bench.lengths --parts => parts=
bench.zeroth --parts => parts=
bench.zeroth --rate 0 => rate=0
bench.zeroth --shape 2 100 => shape=2 100
bench.zeroth --batch 0 => batch=0
bench.loss --tasks birds => tasks: 'birds' does not exist; choose among digits, cifar, bytes
bench.loss --tau 0 => tau=0: give 1 or more
bench.loss --steps 0 => steps=0: give 1 or more
bench.loss --workers 0 => workers=0: give a number above 0
bench.loss --methods adam => method 'adam' does not exist; choose among ddp, local
bench.loss --methods co2:speed=1 => co2 has no option 'speed'
bench.loss --methods local:beta=1 => local has no option 'beta'; it has: wire
bench.loss --device cuda => device=cuda: this torch finds no CUDA device
bench.loss --methods co2:merge=half => merge='half'; choose among outer, mix, keep
bench.loss --methods co2:beta=x => beta='x'; give a number, 0 or more
bench.loss --methods co2:delay=1.5 => delay='1.5'; give a whole number, 0 or more
bench.loss --methods ddp:wire=int1 => wire='int1'; choose among float32, bfloat16
bench.loss --methods co2:nesterov=1 => nesterov='1'; choose among true, false
bench.loss --methods co2:delay=9 --tau 6 => delay=9: between 0 and tau=6
bench.loss --methods co2:beta=0|0.1|0.2 --configurations 2 => make 3 configurations; allow as many
bench.loss --seeds 0 100 => seeds=100: it is the tuning seed
bench.slow_links --methods ddp zip => methods: 'zip'
bench.slow_links --workers 1 => workers=1
bench.slow_links --rates 0 => rates=0.0
bench.time_to_loss --tasks speech => tasks: 'speech' does not exist; choose among vision, language
bench.time_to_loss --methods co2 sgd => methods: 'sgd' does not exist; choose among none, ddp
bench.time_to_loss --rates 0 => rates=0.0: give a number above 0
bench.time_to_loss --seeds 1 1 => seeds=1 1: give one or more, each once
bench.time_to_loss --workers 1 => workers=1: a lone worker has no link
bench.time_to_loss --target nan => target=nan: give a number above 0
bench.time_to_loss --step_ms -1 => step_ms=-1.0: give 0 or more
bench.time_to_loss --eval_every 0 => eval_every=0: give 1 or more
bench.time_to_loss --methods local:beta=1 => 'local:beta=1' has 'beta=1'; give one of wire, tau, lr
bench.time_to_loss --throttle --out FOLDER => holds a measurement: choose another --out
"""


@pytest.mark.parametrize("case", CASES.strip().splitlines())
def test_a_mistake_is_one_line(mistake: Mistakes, tmp_path: Path, case: str):
    """Within a command's own process; nothing is measured, nor written."""
    command, said = case.split(" => ")
    for name in ("scaling", "time_to_loss"):
        (tmp_path / f"{name}.json").write_text("{}")
    module, *arguments = command.replace("FOLDER", f"{tmp_path}").split()
    message = mistake(module, *arguments)
    assert message.startswith("error: ") and said in message and message.count("\n") == 1, message
