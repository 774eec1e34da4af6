#!/usr/bin/env python3
"""Builds and runs everything that this machine can test; called by ./test, which installs what is needed.

Each step is a build with its suites, or a static check. A step's own outcome (it builds, it is clean) counts as one
test, and every ctest test of its suites as one more. Only a GPU, an NPU, several hosts or an instruction set that the
machine lacks is a reason to skip; any other skip is a failure. Full output is kept under build/logs.
The last line reads "N passed, N failed, N skipped"."""
import argparse
import concurrent.futures
import hashlib
import json
import os
import pathlib
import re
import resource
import shlex
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
LOGS = BUILD / "logs"
CPUS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
CXX_SUFFIXES = {".c", ".h", ".cpp", ".hpp", ".cu", ".cuh"}
# The only reasons for which a test may be skipped.
LACKS_HARDWARE = re.compile(r"\b(this machine (lacks|has no)|this build is not for|needs (a GPU|an NPU|several hosts))\b", re.IGNORECASE)


class Tally:
    """What passed, failed (with the text to show) and was skipped (with the reason)."""

    def __init__(self):
        self.passed, self.failed, self.skipped = 0, [], []

    def summary(self):
        return f"{self.passed} passed, {len(self.failed)} failed, {len(self.skipped)} skipped"


def tail(text, lines=40):
    return "\n".join(text.rstrip().splitlines()[-lines:])


def cpu_seconds():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def environment(scope=None, extra=None):
    env = {name: value for name, value in os.environ.items() if not name.startswith("LOGITLESS_")}
    if scope:
        env["LOGITLESS_TEST_SCOPE"] = scope
    env.update(extra or {})
    return env


def execute(log_name, *commands, env=None):
    """Runs commands one after another into one log; (all succeeded, the log's text)."""
    log = LOGS / f"{log_name}.log"
    with open(log, "w", encoding="utf-8", errors="replace") as file:
        for command in commands:
            file.write(f"$ {shlex.join(map(str, command))}\n")
            file.flush()
            done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                                  env=env or environment())
            if done.returncode != 0:
                file.write(f"exit code {done.returncode}\n")
                break
    return done.returncode == 0, log.read_text(encoding="utf-8", errors="replace")


def sources():
    """This project's C and C++ files: known to git or about to be, or all when this is no repository."""
    listing = subprocess.run(["git", "-c", "safe.directory=*", "ls-files", "--cached", "--others", "--exclude-standard"],
                             cwd=ROOT, capture_output=True, text=True)
    if listing.returncode == 0:
        paths = [ROOT / line for line in listing.stdout.splitlines()]
    else:
        paths = [path for path in ROOT.rglob("*") if BUILD not in path.parents]
    return sorted(path for path in paths if path.suffix in CXX_SUFFIXES and path.is_file())


# ---- steps ----------------------------------------------------------------------------------------------------------


def step_format(tally, _options):
    frozen = ROOT / "tests" / "api" / "frozen"  # headers of past versions stay as they were
    files = [path for path in sources() if not (path.suffix == ".h" and path.parent == frozen)]
    good, text = execute("format", ["clang-format-19", "--dry-run", "-Werror", "--fallback-style=none", *files])
    wrong = sorted(set(re.findall(r"^(\S+?):\d+:\d+: error: code should be clang-formatted", text, flags=re.M)))
    record(tally, "format", good, "clang-format-19 -i " + " ".join(wrong) if wrong else text)


def record(tally, name, good, text):
    if good:
        tally.passed += 1
    else:
        tally.failed.append((name, tail(text)))
    return good


def build(tally, preset, targets=()):
    directory = BUILD / preset
    commands = [["cmake", "--preset", preset]]
    commands.append(["cmake", "--build", directory, "-j", str(CPUS)] + (["--target", *targets] if targets else [])
                    + ["--", "-k", "0"])
    good, text = execute(f"{preset}-build", *commands)
    errors = [line for line in text.splitlines() if re.search(r"\b(error|FAILED)\b", line)]
    return record(tally, f"{preset}: builds without warnings", good, tail(text) + "\n" + "\n".join(errors[:20]))


def ctest(tally, preset, scope=None, arguments=(), extra=None):
    """Runs a build's suites and reads what happened from ctest's JUnit file."""
    directory = BUILD / preset
    # Which tests exist may depend on the scope, and lists of tests are kept from run to run.
    remembered = directory / "test_scope.txt"
    if not remembered.exists() or remembered.read_text() != str(scope):
        for path in directory.rglob("*_tests.cmake"):
            path.unlink()
        remembered.write_text(str(scope))
    report = LOGS / f"{preset}-tests.xml"
    report.unlink(missing_ok=True)
    good, text = execute(
        f"{preset}-tests",
        ["ctest", "--test-dir", directory, "-j", str(CPUS), "--no-tests=error", "--output-on-failure", "--output-junit",
         report, "--test-output-size-passed", "65536", "--test-output-size-failed", "65536", *arguments],
        env=environment(scope, extra))
    if not report.exists():
        record(tally, f"{preset}: ctest", False, text)
        return
    failures = 0
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{preset}: {re.sub(' +# GetParam.*', '', case.get('name'))}"
        output = case.findtext("system-out") or ""
        if case.get("status") == "run" and case.find("failure") is None:
            tally.passed += 1
        elif case.find("skipped") is not None and case.get("status") != "fail" and LACKS_HARDWARE.search(
                skip_reason(output)):
            tally.skipped.append((name, skip_reason(output)))
        else:
            failures += 1
            why = case.find("failure")
            status = why.get("message") if why is not None else case.get("status")
            tally.failed.append((name, f"[{status}] {tail(output)}"))
    if not good and not failures:
        record(tally, f"{preset}: ctest", False, text)


def skip_reason(output):
    """The reason that a test printed: the line after gtest's "file:line: Skipped", or "SKIP: reason"."""
    match = re.search(r"(?:: Skipped\n|^SKIP: )(.+)$", output, flags=re.M)
    return match.group(1).strip() if match else "no reason given"


def step_release(tally, options):
    if build(tally, "ci-gcc", ["quick"] if options.quick else []):
        if options.quick:
            ctest(tally, "ci-gcc", "reduced", ["-LE", "slow", "-E", "^test_mutation_NOT_BUILT$"])
        else:
            ctest(tally, "ci-gcc", "full" if options.full else None)


def step_clang(tally, _options):
    """What is shipped; the tests are compiled by clang, warnings as errors too, in the step asan."""
    build(tally, "ci-clang", ["logitless", "logitless_cli", "tiny_lm"])


def step_asan(tally, _options):
    if build(tally, "asan"):
        # Suite tests the tests; the real head is 200 GFLOP of the same code, which the release build runs.
        ctest(tally, "asan", "reduced", ["-E", "conformance/Suite|cli/test_real_head"],
              extra={"ASAN_OPTIONS": "strict_string_checks=1:detect_stack_use_after_return=1:allocator_may_return_null=1",
                     "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1"})


def step_tsan(tally, _options):
    if build(tally, "tsan"):
        # What threads share is the same for all targets, so the machine's best ones do; and Suite tests the tests.
        ctest(tally, "tsan", "reduced", ["-E", "conformance/(Suite|.*/(scalar|emulated))"],
              extra={"TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1"})


def step_fuzz(tally, options):
    seconds = "5" if options.quick else "60" if options.full else "20"
    if build(tally, "fuzz", ["fuzzers"]):
        ctest(tally, "fuzz", extra={"LOGITLESS_FUZZ_SECONDS": seconds})


def step_tidy(tally, _options):
    """clang-tidy over src, include and cli; a file that was clean before is not read again until it, a header, the
    configuration or its command changes."""
    good, text = execute("tidy-configure", ["cmake", "--preset", "tidy"])
    if not good:
        record(tally, "tidy", False, text)
        return
    ours = (ROOT / "src", ROOT / "cli")
    entries = [entry for entry in json.loads((BUILD / "tidy" / "compile_commands.json").read_text())
               if any(folder in pathlib.Path(entry["file"]).parents for folder in ours)
               and "LOGITLESS_MUTATIONS" not in entry["command"]]
    common = hashlib.sha256((ROOT / ".clang-tidy").read_bytes())
    for path in sources():
        if path.suffix in (".h", ".hpp"):
            common.update(path.read_bytes())
    clean = LOGS.parent / "tidy-clean"
    clean.mkdir(exist_ok=True)

    def check(entry):
        key = common.copy()
        key.update(entry["command"].encode() + pathlib.Path(entry["file"]).read_bytes())
        stamp = clean / key.hexdigest()
        if stamp.exists():
            return True, ""
        done = subprocess.run(["clang-tidy-19", "-p", BUILD / "tidy", "--quiet", entry["file"]], cwd=ROOT,
                              stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode == 0:
            stamp.touch()
        return done.returncode == 0, done.stdout + done.stderr

    with concurrent.futures.ThreadPoolExecutor(CPUS) as pool:
        results = list(pool.map(check, entries))
    output = "".join(text for _, text in results)
    (LOGS / "tidy.log").write_text(output)
    findings = "\n".join(sorted(set(re.findall(r"^.*(?:warning|error): .*$", output, flags=re.M))))
    record(tally, "tidy", all(good for good, _ in results), findings or output)


def step_device(tally, _options):
    """The contract is host and device code: clang must make PTX of it, and nvcc too where it is. Nothing runs."""
    source, headers = ROOT / "tests" / "nvcc" / "contract.cu", ["-std=c++20", "-I", ROOT / "src"]
    good, text = execute("device-clang", ["clang++-19", "-x", "cuda", "--cuda-device-only", "--cuda-gpu-arch=sm_80",
                                          "-nocudainc", "-nocudalib", "-Wall", "-Wextra", "-Werror",
                                          "-Wno-unknown-cuda-version", "-include",
                                          source.with_name("without_toolkit.h"), *headers, "-S", source, "-o",
                                          LOGS / "contract.ptx"])
    record(tally, "device: clang compiles the contract", good, text)
    if shutil.which("nvcc"):
        good, text = execute("device-nvcc", ["nvcc", "-arch=sm_80", "-Werror", "all-warnings", *headers, "-c", source,
                                             "-o", LOGS / "contract.o"])
        record(tally, "device: nvcc compiles the contract", good, text)


def python_environment(tally):
    """build/python/venv with what the Python tests need; made anew when the list of requirements changes."""
    folder, wanted = BUILD / "python" / "venv", ROOT / "tests" / "python" / "requirements.txt"
    stamp = folder / "complete"
    state = f"{sys.version}\n{wanted.read_text()}"
    if not stamp.exists() or stamp.read_text() != state:
        shutil.rmtree(folder, ignore_errors=True)
        pip = [folder / "bin" / "pip", "install", "-q"]
        good, text = execute("python-environment", [sys.executable, "-m", "venv", folder], [*pip, "torch==2.13.0"],
                             [*pip, "-r", wanted])
        if not record(tally, "python: torch and the other requirements can be installed", good, text):
            return None
        stamp.write_text(state)
    return folder / "bin"


def step_python(tally, _options):
    """The wheel as a user gets it, its suite, ruff and mypy."""
    bin_folder = python_environment(tally)
    if bin_folder is None:
        return
    good, text = execute("python-wheel", [ROOT / "tools" / "wheel", "--define", "LOGITLESS_WERROR=ON", "--define",
                                          "CMAKE_CXX_COMPILER=g++-12"])
    if not record(tally, "python: the wheel builds, is repaired and works alone", good, text):
        return
    good, text = execute("python-install", [bin_folder / "pip", "install", "-q", "--force-reinstall", "--no-deps",
                                            text.split()[-1]])
    if not record(tally, "python: the wheel installs", good, text):
        return
    for name, command in (("ruff check", ["ruff", "check"]), ("ruff format", ["ruff", "format", "--check"])):
        folders = ["python", "tests/python", "examples/python"]
        good, text = execute(f"python-{command[1]}", [bin_folder / command[0], *command[1:], *folders])
        record(tally, f"python: {name}", good, text)
    good, text = execute("python-mypy", [bin_folder / "mypy"])
    record(tally, "python: mypy", good, text)
    report = LOGS / "python-tests.xml"
    report.unlink(missing_ok=True)
    # PATH: the tests find the `logitless` that the wheel brought. -P: the installed package, not the source tree's.
    # Threads of OpenMP that spin would take the time of the processes that tests start.
    good, text = execute("python-tests", [bin_folder / "python", "-P", "-m", "pytest", "tests/python",
                                          f"--junitxml={report}", "-p", "no:cacheprovider"],
                         env=environment(extra={"PATH": f"{bin_folder}:{os.environ['PATH']}", "OMP_WAIT_POLICY": "passive"}))
    count_pytest(tally, report, good, text)


def count_pytest(tally, report, good, text):
    """Counts a JUnit file of pytest, whose skips are failures unless hardware is missing."""
    if not report.exists():
        record(tally, "python: pytest", False, text)
        return
    failures = 0
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = f"python: {case.get('classname')}.{case.get('name')}"
        fault = next((child for child in case if child.tag in ("failure", "error")), None)
        skip = case.find("skipped")
        if fault is None and skip is None:
            tally.passed += 1
        elif fault is None and LACKS_HARDWARE.search(skip.get("message") or ""):
            tally.skipped.append((name, skip.get("message")))
        else:
            failures += 1
            tally.failed.append((name, tail(fault.text or "" if fault is not None else f"skipped: {skip.get('message')}")))
    if not good and not failures:
        record(tally, "python: pytest", False, text)


# name: (function, part of --quick, what it is)
STEPS = {
    "format": (step_format, True, "clang-format 19 over all C and C++ files"),
    "device": (step_device, True, "the contract compiles for a GPU: clang 19, and nvcc where there is one"),
    "release": (step_release, True, "gcc 12, optimised, warnings are errors: all suites"),
    "fuzz": (step_fuzz, True, "libFuzzer on the file readers, clang 19, ASan + UBSan"),
    "python": (step_python, False, "the wheel in a fresh environment, PyTorch and Hugging Face suites, ruff, mypy"),
    "clang": (step_clang, False, "clang 19, optimised, warnings are errors: what is shipped compiles"),
    "tidy": (step_tidy, False, "clang-tidy 19 over src, include and cli"),
    "asan": (step_asan, False, "address and undefined-behaviour sanitizers: all suites, reduced conformance"),
    "tsan": (step_tsan, False, "thread sanitizer: units, API, reduced conformance"),
}


def main():
    parser = argparse.ArgumentParser(prog="./test", description="Builds and runs everything that this machine can test.",
                                     epilog="Example: ./test --quick")
    parser.add_argument("--quick", action="store_true", help="the suites that fail most often")
    parser.add_argument("--full", action="store_true", help="wider conformance, longer fuzzing")
    parser.add_argument("--only", metavar="NAME", help="one step, or the tests of the release build that match NAME")
    parser.add_argument("--without", metavar="STEP,..", default="", help="leave steps out; they are named in the output")
    parser.add_argument("--list", action="store_true", help="name the steps and stop")
    options = parser.parse_args()
    if options.list:
        for name, (_, quick, what) in STEPS.items():
            print(f"{name:8} {what}{' (also in --quick)' if quick else ''}")
        return 0
    without = [name for name in options.without.split(",") if name]
    if unknown := [name for name in without if name not in STEPS]:
        parser.error(f"--without: {unknown[0]!r} is no step (./test --list names them)")
    LOGS.mkdir(parents=True, exist_ok=True)
    tally = Tally()
    chosen = {name: step for name, step in STEPS.items()
              if (options.only == name if options.only else step[1] or not options.quick) and name not in without}
    if options.only and not chosen:
        def matching(tally, options):
            if build(tally, "ci-gcc"):
                ctest(tally, "ci-gcc", "full" if options.full else None, ["-R", options.only])
        chosen = {"release": (matching, True, f"tests of the release build that match {options.only}")}
    for name, (function, _, what) in chosen.items():
        before = (tally.passed, len(tally.failed), len(tally.skipped))
        start, start_cpu = time.monotonic(), cpu_seconds()
        print(f"{name:8} {what} ...", flush=True)
        function(tally, options)
        passed, failed, skipped = (now - then for now, then in zip(
            (tally.passed, len(tally.failed), len(tally.skipped)), before))
        print(f"{name:8} {passed} passed, {failed} failed, {skipped} skipped in {time.monotonic() - start:.0f} s "
              f"(processors {cpu_seconds() - start_cpu:.0f} s)", flush=True)
    if options.quick and not options.only:
        print("not part of --quick: " + ", ".join(name for name, step in STEPS.items() if not step[1])
              + ", mutants, examples, the wider conformance")
    if without:
        print("left out by --without: " + ", ".join(without))
    for reason in dict.fromkeys(reason for _, reason in tally.skipped):
        print(f"\nskipped: {reason}")
        for name, its_reason in tally.skipped:
            if its_reason == reason:
                print(f"  {name}")
    for name, text in tally.failed:
        print(f"\nFAILED {name}\n{text}")
    if tally.failed:
        print(f"\nfailed ({LOGS.relative_to(ROOT)} has the full output):")
        for name, _ in tally.failed:
            print(f"  {name}")
    print(tally.summary(), flush=True)
    return 1 if tally.failed else 0


if __name__ == "__main__":
    sys.exit(main())
