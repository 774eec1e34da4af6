"""The binding against the header: names, order, numbers. And what can be had without PyTorch."""

import ctypes
import pathlib
import re
import subprocess
import sys

import pytest
from logitless import _abi, _library

import logitless

HEADER = pathlib.Path(__file__).parents[2] / "include" / "logitless" / "logitless.h"


def header():
    return re.sub(r"/\*.*?\*/", " ", HEADER.read_text(), flags=re.S)


def struct_fields(name):
    body = re.search(r"typedef struct %s \{(.*?)\} %s;" % (name, name), header(), flags=re.S).group(1)
    fields = []
    for declaration in body.split(";"):
        declaration = declaration.strip()
        if declaration:
            fields += re.findall(r"(\w+)\s*(?:\[[^\]]*\])?\s*(?:,|$)", re.sub(r"^(const\s+)?\w+\s+", "", declaration))
    return fields


@pytest.mark.parametrize(
    ("name", "struct"),
    [
        ("ll_tensor", _abi.Tensor),
        ("ll_context_options", _abi.ContextOptions),
        ("ll_options", _abi.Options),
        ("ll_problem", _abi.Problem),
        ("ll_arguments", _abi.Arguments),
    ],
)
def test_structs_follow_the_header(name, struct):
    assert [field[0] for field in struct._fields_] == struct_fields(name)


def test_the_library_agrees_on_sizes():
    library = _library.library()
    for init, struct in (("ll_options", _abi.Options), ("ll_problem", _abi.Problem), ("ll_arguments", _abi.Arguments)):
        made = struct()
        getattr(library, init + "_init_sized")(ctypes.byref(made), ctypes.sizeof(made))
        assert made.size == ctypes.sizeof(struct)
    # A struct that is one field short would end before the last default that the library writes.
    options = _abi.Options()
    library.ll_options_init_sized(ctypes.byref(options), ctypes.sizeof(options))
    assert (options.clip_low, options.beta, options.filter_seed) == (0.2, 0.5, 0)


def test_numbers_follow_the_header():
    numbers = {name: int(value) for name, value in re.findall(r"\b(LL_[A-Z0-9_]+) = (\d+)", header())}
    assert len(numbers) > 60
    groups = {
        "LL_": {
            "F32",
            "BF16",
            "F16",
            "F64",
            "I32",
            "I64",
            "U8",
            "NONE",
            "OK",
            "LINEAR",
            "LOGITS",
            "FORWARD",
            "FORWARD_BACKWARD",
            "BACKWARD",
            "TEXT",
            "JSON",
            "IN_PLACE",
            "TOPK_LOG",
            "ENTROPY_GRADIENT",
            "DEVICE_CPU",
            "DEVICE_CUDA",
            "BACKEND_CPU",
            "BACKEND_REFERENCE",
            "BACKEND_CUDA",
            *(name for name in vars(_abi) if name.startswith("ERROR_")),
        },
    }
    for prefix, names in groups.items():
        for name in names:
            assert getattr(_abi, name) == numbers[prefix + name], name
    for table, prefix in (
        (_abi.SMOOTHING, "LL_SMOOTHING_"),
        (_abi.ON_EMPTY, "LL_EMPTY_"),
        (_abi.TARGETS, "LL_TARGETS_"),
        (_abi.REST, "LL_REST_"),
        (_abi.RULE, "LL_RULE_"),
    ):
        assert {prefix + name.upper(): value for name, value in table.items()} == {
            name: value for name, value in numbers.items() if name.startswith(prefix)
        }
    assert _abi.REDUCTION == {"mean": numbers["LL_MEAN"], "sum": numbers["LL_SUM"], "none": numbers["LL_PER_ROW"]}
    assert _abi.DIVERGENCE == {
        "forward_kl": numbers["LL_FORWARD_KL"],
        "reverse_kl": numbers["LL_REVERSE_KL"],
        "jsd": numbers["LL_JSD"],
    }
    for name, bit in _abi.INPUT_BITS.items():
        assert bit == numbers["LL_" + name.upper()]
    outputs = {
        "row_entropy": "LL_ENTROPY",
        "row_argmax": "LL_ARGMAX",
        "row_correct": "LL_ARGMAX",
        "correct_rows": "LL_ARGMAX",
        "row_mean_logit": "LL_MEAN_LOGIT",
        "row_log_sum_p2": "LL_SUM_P2",
    }
    assert _abi.OUTPUT_BITS == {name: numbers[of] for name, of in outputs.items()}


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_import_needs_neither_torch_nor_transformers():
    done = run(
        "import sys, logitless, logitless.numpy; logitless.info(); logitless.plan(8, 8, 8);"
        "print(sorted({'torch', 'transformers'} & sys.modules.keys()))"
    )
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(("name", "module"), [("linear_cross_entropy", "torch"), ("patch", "transformers")])
def test_a_missing_package_is_named(name, module):
    done = run(f"import sys; sys.modules['{module}'] = None; import logitless; logitless.{name}")
    assert f"logitless.{name} needs {module}: pip install" in done.stderr


def test_a_missing_library_is_named():
    done = run(
        "import os; os.environ['LOGITLESS_LIBRARY'] = '/nowhere/liblogitless.so'; import logitless; logitless.info()"
    )
    assert done.returncode != 0
    assert "/nowhere/liblogitless.so is missing" in done.stderr


def test_a_second_copy_in_one_process_is_explained():
    done = run(
        "import torch; taken = torch.library.Library('logitless', 'DEF'); import logitless; logitless.op_calls()"
    )
    assert done.returncode != 0
    assert "ImportError: logitless: the operator namespace" in done.stderr


def test_info_and_plan():
    info = logitless.info()
    assert info["version"]
    plan = logitless.plan(2048, 512, 32000, memory_budget="64MiB")
    assert 0 < plan.workspace_bytes <= 64 << 20
    assert plan.data["workspace_bytes"] == plan.workspace_bytes
    assert "workspace" in str(plan)
    assert logitless.plan(64, 64, 999, call="backward", softcap=30.0, dtype="float32").workspace_bytes > 0
    with pytest.raises(ValueError, match="memory_budget"):
        logitless.plan(2048, 512, 32000, memory_budget=1000)
    with pytest.raises(ValueError, match="memory_budget: '12 parsecs'"):
        logitless.plan(8, 8, 8, memory_budget="12 parsecs")
    with pytest.raises(ValueError, match="dtype: 'int8'"):
        logitless.plan(8, 8, 8, dtype="int8")
