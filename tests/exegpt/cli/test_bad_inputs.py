"""Bad inputs: exit code 2, one sentence on standard error, nothing on standard output, no traceback."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest


def check_refused(done, message):
    assert done.code == 2, (done.code, done.out, done.err)
    assert done.out == ""
    lines = done.err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("exegpt: ") and lines[0].endswith(".")
    assert re.search(message, lines[0]), lines[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("tune -l 5s --model opt-14b", "'opt-14b': the nearest are opt-13b"),
        ("tune -l 5s --model jamba-1.5-mini", "'jamba-1.5-mini'"),
        ("tune -l 5s --workload X", "'X'"),
        ("tune -l 5s --workload 0/5", "'0/5'"),
        ("tune -l 5s --workload gone.csv", r"'gone\.csv'"),
        ("tune -l 5s --cluster 4xZ80", "'Z80'.*A40"),
        ("tune -l 5s --cluster nonsense", "'nonsense' is not a cluster"),
        ("tune -l 0s", "'0s'"),
        ("tune -l -5s", "'-5s'"),
        ("tune -l 5", "'5' is not a duration"),
        ("tune -l 5s --ttft 0ms", "'0ms'"),
        ("tune -l 5s --bound p50", "--bound 'p50'"),
        ("tune -l 5s --search magic", "--search 'magic'"),
        ("tune -l 5s --policy rra,magic", "'magic'"),
        ("tune -l 5s --dtype int3", "--dtype 'int3'"),
        ("tune -l 5s --kv-dtype int4", "--kv-dtype 'int4'"),
        ("tune -l 5s --kv-dtype int8", "--kv-dtype int8 runs on CPUs only, and the cluster is '4xA40'"),
        ("tune -l 5s --rate 5", "'5' is not an arrival rate"),
        ("tune -l 5s --workload t.csv --columns a=b", "'a=b'"),
        ("tune -l 5s --columns input=a", "'input=a' .* leave --columns out"),
        ("tune -l 5s --tolerance -1", r"--tolerance.*-1.*exegpt tune --help"),
        ("tune -l 5s --threads 100000", r"--threads.*100000"),
        ("tune -l 5s --rate 1/s --seed -1", r"--seed.*-1"),
        ("tune -l 5s --export lmdeploy", "--export 'lmdeploy'"),
        ("tune -l 5s --export vllm --export-as helm", "--export-as 'helm'"),
        ("tune -l 5s --export-as compose", "--export-as is about an exported engine: add --export"),
        ("tune -l 5s --cluster 1000000x8xA40", "8,000,000 devices: the maximum is 100,000"),
        ("tune -l 5s --out x.json --report ./x.json", r"'x\.json' is used twice in this command"),
        ("plan models.yaml --cluster 4xA40 --out /nowhere/p.json", "no folder '/nowhere'"),
        ("demo --trace gone.csv --dir d", r"no trace file 'gone\.csv'"),
        ("demo --trace gone.csv -w T --dir d", "both give lengths: leave one of them out"),
        ("demo --columns input=a --dir d", "leave --columns out"),
        (f"model create new --seed {2**63}", "--seed"),
        ("profile import vidur -m opt-13b -o p.json", "No folder is given"),
        ("reproduce table9", r"'table5'\? see `exegpt reproduce --help`"),
        ("tune -l 5s --out /dev/null", "'/dev/null' is a device or a pipe"),
        ("tune -l 5s --report /dev/full", "'/dev/full' is a device or a pipe"),
        (f"tune -l 5s -w {'9' * 5000}/1", "is not a workload"),
        (f"tune -l 5s -c {'9' * 5000}xA40", "is not a cluster"),
        (f"tune -l 5s --rate {'9' * 400}/s", "is not an arrival rate"),
        (f"tune -l 5s --model {'a' * 5000}", "File name too long"),
        ("tune -l 5s --model opt-13b --cluster=", "'--cluster=' is empty"),
        ("tune -l 5s --tolerance inf", "--tolerance"),
        ("tune -l 5s --tolerance 1.5", "--tolerance"),
        ("tune -l 5s --out /proc/s.json", "'/proc/s.json' can't be written"),
        (f"tune -l {'9' * 400}s", "not a usable duration"),
        ("tune -l 5s --gpu-memory-fraction 1.5", r"1\.5"),
        ("tune -l 5s --profile gone.json", r"'gone\.json'"),
        ("tune -l 5s --out /nowhere/s.json", "no folder '/nowhere'"),
        ("tune", "--latency-bound"),
        ("tune -l", "-l"),
        ("tune -l 5s --wrong", "--wrong"),
        ("nonsense", "nonsense"),
        ("list nonsense", "'nonsense'"),
        ("show gone.json", r"'gone\.json'"),
        ("simulate", "--schedule"),
        ("simulate --schedule gone.json", r"'gone\.json'"),
        ("simulate --schedule gone.json --columns input=a", "leave --columns out"),
        ("simulate --model opt-13b --max-num-seqs 4 --replicas 9", "9 replicas do not fit"),
        ("simulate --model opt-13b --max-num-seqs 4 --replicas 2 --tp-degree 4", "degree of 4 doesn't fit.*1, 2"),
        (
            "simulate --model opt-13b --max-num-seqs 4 --tp-degree 3",
            "degree of 3 is not possible.*: use one of 1, 2, 4",
        ),
        (
            "simulate --model opt-13b --max-num-seqs 4 --max-num-batched-tokens 9999999",
            "can't start.*9,999,999 tokens and 4 sequences",
        ),
        ("simulate --model opt-13b --max-num-seqs 4000", "4,000 sequences"),
        ("simulate --model t5-11b --max-num-seqs 4", "--policy orca"),
        ("simulate --model opt-13b --max-num-seqs 4 --kv-blocks 2", "longest request of 591 tokens.*--kv-blocks 37"),
        ("tune -l 5s --encode-devices 1 --policy orca", "Policy orca has no encode_devices; waa-c, waa-m have"),
        ("tune -l 5s --max-num-seqs 4 --encode-batch 8", "has encode_batch and max_num_seqs; leave one out"),
        ("simulate --model opt-13b --policy static --encode-batch 100000", r"encode_batch=100,000 needs \d[\d,.]*%"),
        ("simulate --model opt-13b --max-num-seqs 4 --prefills-per-step 2", "Policy chunked has no"),
        ("simulate --model opt-13b --max-num-seqs 4 --policy rra", "rra has no --max-num-seqs"),
        ("simulate --model opt-13b --shuffle 10", "--shuffle 10"),
        ("simulate --model opt-13b --replay t.csv --agents 2 --shuffle 10", "the turns of --agents 2"),
        ("simulate --schedule s.json --replicas 2", "leave --replicas 2 or --schedule out"),
        ("simulate --schedule s.json --cluster 2xA40", "leave --cluster 2xA40 or --schedule out"),
        ("tune -l 5s --model t5-11b --export vllm", "encoder-decoder models"),
        ("run --model gone --requests r.jsonl", "'gone'"),
        ("profile --model gone", "'gone'"),
        ("model create . --arch llama", "exists already"),
        ("model create new --arch rnn", "'rnn'"),
        ("model create new --hidden 30 --heads 4", "30"),
        ("model create new --dtype int8", "'int8'"),
        ("model create new --layers 0", "--layers"),
    ],
)
def test_what_is_typed(exegpt, arguments, message):
    check_refused(exegpt(*arguments.split()), message)


def test_an_empty_argument_is_never_a_default(exegpt):
    for option in ("--cluster", "--columns", "--profile", "--model"):
        check_refused(exegpt("tune", "-l", "5s", option, ""), f"after '{option}' is empty")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(28, "No space left on device"), "disk is full"),
        (OSError(5, "Input/output error", "/mnt/s.json"), r"'/mnt/s\.json' can't be used \(Input/output error\)"),
        (OSError(23, "Too many open files"), "Too many open files"),
    ],
)
def test_a_system_error_is_one_sentence(exegpt, monkeypatch, error, message):
    def refused(*_):
        raise error

    monkeypatch.setattr("xcore.document.read_json", refused)
    check_refused(exegpt("show", "s.json"), message)


def test_a_terminal_that_lacks_a_letter_gets_its_escape(tmp_path):
    (tmp_path / "t.csv").write_text("input,output\n5,3\n")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    command = (sys.executable, "-m", "exegpt", *"tune -l inf --no-advice --policy static -w t.csv".split())
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert b"Best: static" in done.stdout


@pytest.mark.parametrize("arguments", ["", "model", "reproduce"])
def test_a_command_that_has_commands_shows_them(exegpt, arguments):
    done = exegpt(*arguments.split())
    assert done.code == 2 and done.out == ""
    assert done.err.startswith(f"Usage: exegpt {arguments}".rstrip()) and "Commands:" in done.err


@pytest.mark.parametrize("command", ["tune -l inf -w w.csv --out w.csv", "simulate --replay w.csv --timeline ./w.csv"])
def test_no_output_replaces_what_is_read(exegpt, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "w.csv").write_text("input,output\n5,3\n")
    check_refused(exegpt(*command.split()), r"w\.csv' is used twice in this command")
    assert (tmp_path / "w.csv").read_text() == "input,output\n5,3\n"


def test_an_interrupt_is_printed_in_one_word(exegpt, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("exegpt.api.tune_settings.find_setting", interrupted)
    done = exegpt("tune", "-l", "5s")
    assert (done.code, done.out, done.err) == (130, "", "exegpt: Interrupted.\n")


def test_a_file_that_may_not_be_read_is_named(exegpt, monkeypatch):
    def refused(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("xcore.document.read_json", refused)
    check_refused(exegpt("show", "secret.json"), r"'secret\.json' can't be used \(Permission denied\)")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "no input column"),
        ("input,output\n", "no requests"),
        ("input,output\n5,-1\n", "row 2, column 'output': '-1'"),
        ("input,output\n5,0\n", "no requests"),
        ("input,output\n5,many\n", "'many'"),
        ("input,output\n,3\n", "row 2, column 'input'"),
    ],
)
def test_traces(exegpt, tmp_path, text, message):
    (tmp_path / "t.csv").write_text(text)
    check_refused(exegpt("tune", "-l", "5s", "--workload", tmp_path / "t.csv"), message)


def test_model_directories(exegpt, tiny, tmp_path):
    (tmp_path / "t.csv").write_text("input,output\n5,3\n")
    empty = tmp_path / "empty"
    empty.mkdir()
    check_refused(exegpt("run", "-m", empty, "-r", tmp_path / "t.csv"), r"no config\.json")
    check_refused(exegpt("profile", "-m", empty), r"no config\.json")
    torn = tmp_path / "torn"
    shutil.copytree(tiny, torn)
    weights = next(torn.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-100])
    done = exegpt("run", "-m", torn, "-r", tmp_path / "t.csv", "-p", "roofline")
    assert done.code == 2 and "Traceback" not in done.err
    assert re.search(r"exegpt: .*safetensors.*\.$", done.err.strip().splitlines()[-1])
    config = json.loads((torn / "config.json").read_text())
    for changes, message in (
        ({"model_type": "jamba"}, "'jamba', which is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"hidden_size": "wide"}, "hidden_size = 'wide'"),
    ):
        (torn / "config.json").write_text(json.dumps(config | changes))
        check_refused(exegpt("run", "-m", torn, "-r", tmp_path / "t.csv"), message)
    (torn / "config.json").write_text('{"model_type"')
    check_refused(exegpt("run", "-m", torn, "-r", tmp_path / "t.csv"), "not valid JSON")


def test_a_file_of_another_kind_is_named(exegpt, tiny, tiny_schedule, tiny_profile, tmp_path):
    plan = tmp_path / "plan.json"
    plan.write_text('{"version": 1, "method": "exegpt", "cluster": {}, "models": []}')
    check_refused(exegpt("simulate", "--plan", tiny_schedule), "is a schedule, not a plan")
    check_refused(exegpt("serve", "--plan", tiny_profile, "--model", f"a={tiny}"), "is a profile, not a plan")
    check_refused(exegpt("simulate", "--schedule", plan), "is a plan, not a schedule")
    tune = "tune", "-l", "inf", "-m", tiny, "-w", "20/10", "--profile"
    check_refused(exegpt(*tune, tiny_schedule), "is a schedule, not a profile")


def test_schedules(exegpt, tiny, tiny_schedule, tiny_profile, tmp_path):
    (tmp_path / "t.csv").write_text("input,output\n5,3\n")
    data = json.loads(tiny_schedule.read_text())
    control = data["control"]

    def run(changes):
        (tmp_path / "s.json").write_text(json.dumps(data | changes))
        return exegpt("run", "-m", tiny, "-r", tmp_path / "t.csv", "-s", tmp_path / "s.json", "-p", tiny_profile)

    check_refused(run({"version": 99}), "99")
    check_refused(run({"version": None}), "None")
    check_refused(run({"control": control | {"encode_batch": 0}}), "encode_batch")
    check_refused(run({"control": control | {"encode_batch": 10**9}}), "encode_batch .* from 1 to 10,000,000")
    check_refused(run({"encode_batch": 3}), "encode_batch is a control variable: move it into control")
    check_refused(run({"policy": "magic"}), "policy")
    check_refused(run({"surprise": 1}), "surprise")
    check_refused(run({"kv_dtype": "fp5"}), "kv_dtype 'fp5'")
    check_refused(run({"latency_bound_s": -1}), "bound of -1")
    check_refused(run({"replicas": 2}), "needs 2 devices")
    stage = data["stages"][0]
    for changed, message in (
        ({"devices": []}, "degree 1 has the devices"),
        ({"devices": [7]}, r"devices \[7\]"),
        ({"decoder_layers": [0, 1]}, "layers 0:1 of the 2"),
        ({"decoder_layers": [-1, 10**9]}, "layers -1:1000000000 of the 2"),
        ({"decoder_layers": None}, "layers none of the 2"),
    ):
        check_refused(run({"stages": [stage | changed]}), message)
        assert exegpt("show", tmp_path / "s.json").code == exegpt("simulate", "-s", tmp_path / "s.json").code == 2
    check_refused(run({"stages": [stage, stage]}), r"devices \[0, 0\]")
    spec = data["model"]["spec"] | {"ffn": 65}
    check_refused(run({"model": data["model"] | {"spec": spec}}), "is for model 'tiny'")
    (tmp_path / "s.json").write_text("{")
    check_refused(exegpt("simulate", "-s", tmp_path / "s.json"), "not valid JSON")


@pytest.mark.slow
def test_what_only_a_search_would_heed_is_refused_beside_a_schedule(exegpt, tiny, tiny_schedule, tmp_path):
    (tmp_path / "t.csv").write_text("input,output\n5,3\n")
    for option in ("--policy rra", "--latency-bound 5s", "--encode-batch 2", "--max-num-batched-tokens 64"):
        done = exegpt("run", "-m", tiny, "-r", tmp_path / "t.csv", "-s", tiny_schedule, *option.split())
        check_refused(done, f"leave {option} or --schedule out")
    done = exegpt("run", "-m", tiny, "-r", tmp_path / "t.csv", "--policy", "rra", "--max-num-seqs", 4)
    check_refused(done, "Policy rra has no max_num_seqs")
    done = exegpt("run", "-m", tiny, "-r", tmp_path / "t.csv", "-s", tiny_schedule, "-o", "/dev/null")
    check_refused(done, "is a device")
    done = exegpt("bench", "-m", tiny, "-s", tiny_schedule, "-r", tmp_path / "t.csv", "-w", "T")
    check_refused(done, "leave --workload T or --requests out")


def test_what_json_prints_is_no_schedule(exegpt, tmp_path):
    (tmp_path / "a.json").write_text('{"schedule": {}}')
    check_refused(exegpt("simulate", "-s", tmp_path / "a.json"), "is the output of --json.*--out FILE")


def test_profiles(exegpt, tiny, tiny_profile, tmp_path):
    data = json.loads(tiny_profile.read_text())
    for changes, message in (
        ({"version": 99}, "99"),
        ({"model": "0" * 16}, "another model"),
        ({"dtype": "int3"}, "'int3'"),
        ({"degrees": 3}, "degrees"),
        ({"degrees": []}, "at least one tensor-parallel degree"),
        ({"degrees": [data["degrees"][0] | {"tp": 0}]}, "at least one tensor-parallel degree"),
    ):
        (tmp_path / "p.json").write_text(json.dumps(data | changes))
        check_refused(exegpt("tune", "-l", "inf", "-m", tiny, "-w", "20/10", "-p", tmp_path / "p.json"), message)
    command = ("tune", "-l", "inf", "-m", tiny, "-w", "20/10", "-p", tiny_profile)
    check_refused(exegpt(*command, "--dtype", "bf16"), "is in fp32, not in bf16: pass --dtype fp32")


def test_a_profile_brings_its_dtype(exegpt, tiny, tiny_profile, tmp_path):
    data = json.loads(tiny_profile.read_text())
    (tmp_path / "p.json").write_text(json.dumps(data | {"dtype": "bf16"}))
    done = exegpt("tune", "-l", "inf", "-m", tiny, "-w", "20/10", "-p", tmp_path / "p.json", "--json").json
    assert done["schedule"]["dtype"] == done["schedule"]["kv_dtype"] == "bf16"
    assert "dtype: bf16, the profile's" in done["assumptions"]


def test_requests(exegpt, tiny, tmp_path):
    def run(*lines):
        (tmp_path / "r.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return exegpt("run", "-m", tiny, "-r", tmp_path / "r.jsonl")

    good = {"id": "a", "prompt_ids": [1], "max_tokens": 2}
    check_refused(run(good, good), "'a' .*earlier request")
    check_refused(run({"prompt_ids": [1], "max_tokens": 2}), "line 1 has no id")
    check_refused(run(good | {"max_tokens": -3}), "'a' has max_tokens = -3")
    check_refused(run(good | {"prompt_ids": [300]}), "'a' has the token id 300")
    check_refused(run(good | {"max_tokens": 128}), "'a' needs 129 tokens")
    check_refused(exegpt("run", "-m", tiny, "-r", tmp_path / "gone.jsonl"), r"gone\.jsonl")
    check_refused(exegpt("run", "-m", tiny, "-r", tmp_path / "r.jsonl", "--resume"), "--out")


def test_a_model_that_no_disk_holds_is_refused_before_its_weights_are_drawn(exegpt, tmp_path):
    done = exegpt("model", "create", tmp_path / "new", "--hidden", 100_000_000, "--heads", 8)
    check_refused(done, r"need [\d,]{20,} bytes, and [\d,]+ are free")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments", ["list models", "list models --json", "simulate --model opt-13b --max-num-seqs 4"]
)
def test_a_reader_that_has_gone_is_no_error(arguments):
    command = (sys.executable, "-m", "exegpt", *arguments.split())
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        stderr = process.stderr.read().decode()
    assert process.returncode == 0, stderr
    assert all(line.startswith("· ") for line in stderr.splitlines())


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 5000, "{", "[]"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_files_of_a_model_that_hold_nonsense_are_named(exegpt, tiny, tmp_path, name, text):
    (tmp_path / "r.csv").write_text("input,output\n5,3\n")
    shutil.copytree(tiny, tmp_path / "m")
    (tmp_path / "m" / name).write_text(text)
    done = exegpt("run", "-m", tmp_path / "m", "-r", tmp_path / "r.csv", "-p", "roofline")
    assert done.code == 2 and name in done.err.splitlines()[-1], done.err


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 5000, '{"finish_s": NaN}', "[]"])
def test_a_result_file_that_holds_nonsense_is_named(exegpt, tmp_path, text):
    (tmp_path / "r.jsonl").write_text(text)
    check_refused(exegpt("show", tmp_path / "r.jsonl"), r"r\.jsonl', line 1[,:]")


@pytest.mark.parametrize(
    ("keys", "kind"), [(["policy"], "schedule"), (["degrees"], "profile"), (["models", "cluster"], "plan")]
)
def test_another_kind_of_file_in_place_of_a_models_file_is_named(exegpt, tmp_path, keys, kind):
    file = tmp_path / "other.json"
    file.write_text(json.dumps(dict.fromkeys(keys)))
    check_refused(exegpt("plan", file, "--cluster", "4xA40"), f"'{file}' is a {kind}, not a models file: write one")


def test_a_file_in_place_of_a_model_directory_is_named(exegpt, tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    check_refused(exegpt("serve", "-m", file, "-l", "5s"), f"'{file}' is not a directory: pass the directory")
