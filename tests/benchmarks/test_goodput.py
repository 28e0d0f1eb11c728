"""The answers that `benchmarks.goodput` appends to its file."""

import json
import sys
from dataclasses import replace

from benchmarks import goodput
from xcore import document

ANSWER = goodput.Answer(
    question=str(goodput.QUESTIONS[0]),
    goodput=(3.5, 3.25),
    spread=0.07,
    seconds=(2.0, 2.5),
    cpu_seconds=(4.0, 5.0),
    replays=400,
    policy="orca",
    chosen={"max_num_seqs": 32},
    checks=15,
    broken=1,
    grid=goodput.GridAnswer(3.0, "orca", {"max_num_seqs": 30}, 1.125, 132, 60, 1.5),
)


def test_questions_whose_answers_are_in_the_file_are_not_asked_again(tmp_path, monkeypatch, capsys):
    asked = []

    def answer(question, seeds, policies):
        asked.append(question)
        return replace(ANSWER, question=str(question), grid=None)

    monkeypatch.setattr(goodput, "answer", answer)
    out = tmp_path / "goodput.jsonl"
    out.write_text(json.dumps(document.to_dict(ANSWER)) + "\n")
    monkeypatch.setattr(sys, "argv", ["goodput", "--questions", "1-2", "--out", str(out)])
    goodput.main()
    assert asked == [goodput.QUESTIONS[1]]
    assert len(out.read_text().splitlines()) == 2
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == (
        "2 questions: least ratio 1.1250, largest spread 0.0700, 2 of 30 fresh checks broken, median answer 2.2 s "
        "(4.5 s of CPU)"
    )
