#!/usr/bin/env python3
# Turns ../shared/data/smollm2_head.safetensors (a real head, its weight in 8 bits with a scale for each 32) into plain
# .safetensors that `logitless` reads: hidden BF16 [4096,576], weight BF16 [49152,576], targets I32 [4096].
#
# weight[v,h] = weight_q8[v,h] * weight_scale[v, h // 32], exact in fp32 and rounded once to bf16, to nearest even.
# Standard library only. The work is done by bytes.translate with a table for each distinct scale: a few seconds.
#
#   python3 tools/real_head.py OUT.safetensors [IN.safetensors]
import json
import os
import struct
import sys

GROUP = 32
DEFAULT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "shared", "data",
                       "smollm2_head.safetensors")


def read(path):
    """Every tensor of a .safetensors file: name -> (dtype, shape, bytes)."""
    with open(path, "rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        header = json.loads(file.read(length))
        data = file.read()
    header.pop("__metadata__", None)
    return {name: (t["dtype"], t["shape"], data[t["data_offsets"][0]:t["data_offsets"][1]])
            for name, t in header.items()}


def write(path, tensors):
    header, offset = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    temporary = path + ".tmp"
    with open(temporary, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, _, data in tensors.values():
            file.write(data)
    os.replace(temporary, path)


def bf16_bits(x):
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def tables(scale):
    """For each byte, taken as int8, the low and the high byte of bf16(byte * scale)."""
    bits = [bf16_bits((b - 256 if b > 127 else b) * scale) for b in range(256)]
    return bytes(b & 255 for b in bits), bytes(b >> 8 for b in bits)


def dequantise(q8, scales, rows, cols):
    groups = cols // GROUP
    known = {}
    low, high = [], []
    for n, scale in enumerate(struct.unpack("<%de" % (rows * groups), scales)):
        if scale not in known:
            known[scale] = tables(scale)
        table_low, table_high = known[scale]
        block = q8[n * GROUP:(n + 1) * GROUP]
        low.append(block.translate(table_low))
        high.append(block.translate(table_high))
    out = bytearray(2 * rows * cols)
    out[0::2] = b"".join(low)
    out[1::2] = b"".join(high)
    return bytes(out)


def main(arguments):
    if len(arguments) not in (1, 2) or arguments[0].startswith("-"):
        print("usage: real_head.py OUT.safetensors [IN.safetensors]", file=sys.stderr)
        return 2
    source = arguments[1] if len(arguments) == 2 else DEFAULT
    if not os.path.isfile(source):
        print("real_head.py: no file %s; the real head lies in ../shared/data beside the repository"
              % os.path.normpath(source), file=sys.stderr)
        return 1
    tensors = read(source)
    dtype, (rows, cols), q8 = tensors["weight_q8"]
    scale_dtype, scale_shape, scales = tensors["weight_scale"]
    if dtype != "I8" or scale_dtype != "F16" or cols % GROUP != 0 or scale_shape != [rows, cols // GROUP]:
        print("real_head.py: %s: weight_q8 must be I8 [V,H] and weight_scale F16 [V,H/32]" % source, file=sys.stderr)
        return 1
    write(arguments[0], {
        "hidden": tensors["hidden"],
        "weight": ("BF16", [rows, cols], dequantise(q8, scales, rows, cols)),
        "targets": tensors["targets"],
    })
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
