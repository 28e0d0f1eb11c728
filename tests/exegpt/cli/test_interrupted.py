"""Interrupted commands."""

import pytest

from exegpt import cli


@pytest.mark.parametrize(("command", "line"), [("engine", ""), ("serve", "exegpt: Interrupted.\n")])
def test_an_engine_leaves_it_to_its_server_to_say_that_it_was_interrupted(command, line, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_check_given", interrupted)
    assert cli.main([command]) == 130
    assert capsys.readouterr().err == line
