"""Mutation testing (`make mutants`): do the tests notice when an operator, a number or a condition changes?

The mutants are cosmic-ray's. Its own command, like mutmut, runs one list of tests for each of thousands of mutants and
cannot sample. Here the quick tests that reach the changed line run, closest and shortest first, in a forked process
that has imported the libraries already and stops at the first failure. A mutant that needs `PATIENCE` times the tests'
seconds is killed. Which tests reach a line is recorded under coverage first, which takes some minutes; `--reached`
names a file in which this is kept for later runs.

The working tree is copied to a temporary folder and is itself never changed; what others change in it meanwhile isn't
seen. `equivalent.yaml` lists mutants that compute the same as the original. They run too: one that is killed is listed
wrongly, and an error.
"""

import argparse
import compileall
import importlib
import os
import resource
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

import yaml

from tests.mutants import reached as recording
from tests.mutants.judges import FOLDERS, ROOT, tests_of
from tests.mutants.reached import Reached, record
from tests.mutants.sample import Mutant, sample

LIBRARIES = "hypothesis numba numpy optuna pyarrow pydantic pytest scipy.optimize scipy.stats".split()
PATIENCE = 2
ENOUGH = 0.9


def notices(tree: Path, arguments: list[str], cpu_s: int = resource.RLIM_INFINITY) -> bool:
    """Whether a test fails or the tests need more than `cpu_s`, in a child process: mutants don't share modules."""
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
        os.chdir(tree)
        sys.path[0] = str(tree)
        for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
            del sys.modules[name]
        log = os.open("log", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        import pytest

        options = "-x -q -p no:cacheprovider --timeout=0 --hypothesis-seed=0 --hypothesis-profile=mutants".split()
        os._exit(int(pytest.main([*options, *arguments])))
    return os.waitpid(child, 0)[1] != 0


def killed(tree: Path, mutant: Mutant, reached: Reached, passing: set[str]) -> bool:
    """Whether the tests notice a mutant.

    A test that fails must pass without the mutant; `passing` are those that did.
    """
    file = tree / mutant.path
    original = file.read_text(encoding="utf-8")
    for compiled in file.parent.glob(f"__pycache__/{file.stem}.*"):
        compiled.unlink()
    for tests in tests_of(mutant.path, mutant.line, reached, original):
        cpu_s = 20 + PATIENCE * int(sum(reached.seconds[name] for name in tests))
        file.write_text(mutant.code, encoding="utf-8")
        noticed = notices(tree, tests, cpu_s)
        file.write_text(original, encoding="utf-8")
        if noticed:
            names = failed(tree, tests)
            check_passes(tree, sorted(names - passing) if names else ["--collect-only", *tests])
            passing |= names
            return True
    return False


def failed(tree: Path, tests: list[str]) -> set[str]:
    """The test that failed in the last run; empty if it was ended."""
    log = (tree / "log").read_text(encoding="utf-8", errors="replace")
    lines = [line.partition(" ")[2] for line in log.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return {max(found, key=len) for line in lines if (found := [name for name in tests if line.startswith(name)])}


def check_passes(tree: Path, tests: list[str]) -> None:
    """Exit if tests fail without a mutant, or aren't there any more."""
    if tests and notices(tree, tests):
        sys.exit(f"{' '.join(tests)} fail without a mutant:\n{(tree / 'log').read_text(encoding='utf-8')[-3000:]}")


def judge(tree: Path, mutants: list[Mutant], reached: Reached) -> Counter[str]:
    """Run mutants one by one, print those that no test notices, and count the outcomes."""
    listed = yaml.safe_load((tree / "tests/mutants/equivalent.yaml").read_text(encoding="utf-8")) or []
    equivalent = {(entry["module"], entry["before"], entry["after"]) for entry in listed}
    passing: set[str] = set()
    counts: Counter[str] = Counter()
    for mutant in mutants:
        outcome = "killed" if killed(tree, mutant, reached, passing) else "survived"
        if (mutant.path, mutant.before, mutant.after) in equivalent:
            outcome = "listed wrongly" if outcome == "killed" else "equivalent"
        counts[outcome] += 1
        if outcome != "killed":
            print(f"{outcome}: {mutant.path}:{mutant.line}\n  - {mutant.before}\n  + {mutant.after}", flush=True)
    return counts


def register_profile() -> None:
    """A profile of hypothesis without shrinking, which takes long, and without examples that other mutants failed."""
    from hypothesis import Phase, settings

    settings.register_profile("mutants", deadline=None, phases=(Phase.explicit, Phase.generate))


def copy_tree(tree: Path) -> None:
    """A copy of the working tree, with compiled extensions and without caches; its tests must pass."""
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "build", "dist", "__pycache__"))
    compileall.compile_dir(tree, quiet=2)
    sys.dont_write_bytecode = True  # a mutant's would be taken for the original's
    os.environ["TMPDIR"] = tempfile.tempdir = str(tree.parent)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", choices=FOLDERS, help="folders to mutate", metavar="FOLDER")
    parser.add_argument("--sample", type=int, default=60, help="mutants of each folder")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--reached", type=Path, help="file with what tests reach; it is made if it is not there")
    options = parser.parse_args()
    for library in LIBRARIES:
        importlib.import_module(library)
    register_profile()
    counts = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        tree = Path(place).resolve() / "tree"
        file = (options.reached or tree.parent / "reached.json").resolve()
        copy_tree(tree)
        if not file.exists():
            record(tree, file, [f"tests/{folder}" for folder in recording.FOLDERS.split()])
        reached = Reached.read(file)
        for folder in options.folders:
            counts[folder] = judge(tree, sample(tree, folder, options.sample, options.seed), reached)
    print("| folder | mutants | killed | equivalent | survived | killed of the others |\n|---|---|---|---|---|---|")
    for folder, count in counts.items():
        share = count["killed"] / max(1, count["killed"] + count["survived"])
        outcomes = " | ".join(str(count[outcome]) for outcome in ("killed", "equivalent", "survived"))
        print(f"| {folder} | {count.total()} | {outcomes} | {share:.0%} |")
    return any(c["listed wrongly"] or c["killed"] < ENOUGH * (c["killed"] + c["survived"]) for c in counts.values())


if __name__ == "__main__":
    sys.exit(main())
