"""What a campaign reads from the workers' rounds, from files written by hand."""

from pathlib import Path

from bench.chaos.crew import judged


def test_it_finds_rounds_whose_outer_iterates_differ_and_the_longest_pause(tmp_path: Path):
    (tmp_path / "rounds1.0.0").write_text("1 1 aa 10.0\n1 2 bb 11.5\n1 3 cc 20.0\n")
    (tmp_path / "rounds1.1.0").write_text("1 1 aa 10.1\n1 2 bX 11.0\n1 3 cc 20.5\n")
    (tmp_path / "rounds2.0.0").write_text("2 3 dd 99.0\n2 4 ee 100.0\n")  # resumed
    found = judged(tmp_path)
    assert found == {"rounds": 5, "different_rounds": ["1.2"], "longest_pause_seconds": 9.0}
