#!/usr/bin/env python3
# Writes the seeds of the file fuzzers, tests/fuzz/corpus/fuzz_{safetensors,npy,files}: small valid files that reach every
# branch, and the kinds of lies that tests/files checks. Standard library only; run it again after a change of format.
#
#   python3 tools/fuzz_seeds.py
import os
import struct

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests", "fuzz", "corpus")


def safetensors(header, data=b""):
    return struct.pack("<Q", len(header)) + header + data


def npy(header, data=b"", version=1):
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", len(header)) + header + data


def entry(dtype, shape, first, last):
    return '{"dtype":"%s","shape":%s,"data_offsets":[%d,%d]}' % (dtype, shape, first, last)


def put(target, seeds):
    folder = os.path.join(ROOT, target)
    os.makedirs(folder, exist_ok=True)
    for name, content in seeds.items():
        with open(os.path.join(folder, name), "wb") as file:
            file.write(content)


ST = {
    "empty": safetensors(b"{}"),
    "one": safetensors(('{"x":%s}' % entry("F32", "[2,2]", 0, 16)).encode(), bytes(16)),
    "many": safetensors(
        ('{"__metadata__":{"format":"pt"},"a":%s,"b":%s,"c":%s}   '
         % (entry("F64", "[1]", 0, 8), entry("BF16", "[3]", 8, 14), entry("I64", "[0,4]", 14, 14))).encode(), bytes(14)),
    "escapes": safetensors(('{"a\\u00e9\\ud83d\\ude00\\n":%s}' % entry("U8", "[4]", 0, 4)).encode(), bytes(4)),
    "subbyte": safetensors(('{"a":%s}' % entry("F4", "[8]", 0, 4)).encode(), bytes(4)),
    "misaligned": safetensors(('{"x":%s}' % entry("I32", "[1]", 0, 4)).encode() + b" ", bytes(4)),
    "gap": safetensors(('{"x":%s}' % entry("F32", "[1]", 4, 8)).encode(), bytes(8)),
    "overflow": safetensors(('{"x":%s}' % entry("F32", "[4294967296,4294967296]", 0, 0)).encode()),
    "long_header": struct.pack("<Q", 1 << 40) + b"{}",
}
NPY = {
    "v1": npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }  \n", bytes(24)),
    "v2": npy(b"{'descr': '<i8', 'fortran_order': True, 'shape': (2,), }\n", bytes(16), 2),
    "v3": npy(b"{'descr': '<f2', 'fortran_order': False, 'shape': (), }\n", bytes(2), 3),
    "void": npy(b"{'descr': '|V2', 'fortran_order': False, 'shape': (4,), }\n", bytes(8)),
    "structured": npy(b"{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,), }\n", bytes(4)),
    "fortran": npy(b"{'descr': '<f4', 'fortran_order': True, 'shape': (2, 2), }\n", bytes(16)),
    "quotes": npy(b'{"shape": (1L,), "descr": ">f8", "fortran_order": False}', bytes(8)),
}
put("fuzz_safetensors", ST)
put("fuzz_npy", NPY)
put("fuzz_files", {**{"st_" + k: v for k, v in ST.items()}, **{"npy_" + k: v for k, v in NPY.items()}})
