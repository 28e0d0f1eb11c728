"""What a machine is called: CPUs of one name but different generations have different names."""

import pytest

from xprofiler import machine

ZEN4 = "processor\t: 0\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\nstepping\t: 1\n"
ARM = "processor\t: 0\nBogoMIPS\t: 50.00\nCPU implementer\t: 0x41\nCPU variant\t: 0x1\nCPU part\t: 0xd4f\n"


@pytest.fixture
def system(tmp_path, monkeypatch):
    def name(text):
        monkeypatch.setattr(machine, "_CPUINFO", tmp_path / "cpuinfo")
        if text is not None:
            (tmp_path / "cpuinfo").write_text(text + "\n" + text.replace("model\t\t: 17", "model\t\t: 99"))
        return machine.cpu_name()

    return name


def test_one_name_and_two_generations(system):
    zen4, zen5 = system(ZEN4), system(ZEN4.replace("cpu family\t: 25", "cpu family\t: 26"))
    assert zen4 == "AMD EPYC (cpu family 25, model 17, stepping 1)"
    assert zen5.startswith("AMD EPYC") and zen5 != zen4


def test_a_cpu_without_a_name(system):
    assert system(ARM).endswith("(CPU implementer 0x41, CPU part 0xd4f, CPU variant 0x1)")


def test_a_system_without_cpuinfo(system, monkeypatch):
    monkeypatch.setattr("platform.processor", lambda: "arm")
    assert system(None) == "arm"
