#!/usr/bin/env bash
# run.sh BUILD WORK VERSION: installs BUILD into WORK, moves the installed tree (it must not remember where it was), and
# builds and runs the consumers with CMake and with pkg-config. Every one must print VERSION.
set -euo pipefail
build=$1 work=$2 version=$3
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
rm -rf "$work"
mkdir -p "$work"

check() {
  local said
  said=$("$@") || { echo "$* failed" >&2; exit 1; }
  [[ $said == "$version" ]] || { echo "$* printed '$said', not $version" >&2; exit 1; }
  echo "$1: $said"
}

cmake --install "$build" --prefix "$work/first" >"$work/install.log"
mv "$work/first" "$work/stage"

cmake -G Ninja -S "$here" -B "$work/cmake" -DCMAKE_PREFIX_PATH="$work/stage" -DCMAKE_BUILD_TYPE=Release >"$work/cmake.log"
cmake --build "$work/cmake" -j1
for program in c_shared cpp_shared c_static cpp_static; do
  check "$work/cmake/$program"
done

pc=$(find "$work/stage" -name logitless.pc)
export PKG_CONFIG_PATH=${pc%/*}
[[ $(pkg-config --modversion logitless) == "$version" ]]
libdir=$(pkg-config --variable=libdir logitless)
read -ra cflags <<<"$(pkg-config --cflags logitless)"
read -ra libs <<<"$(pkg-config --libs logitless)"
read -ra static_libs <<<"$(pkg-config --libs --static logitless)"
static_libs=("${static_libs[@]/-llogitless/-l:liblogitless_static.a}")
${CC:-cc} -std=c11 -Wall -Werror "$here/main.c" "${cflags[@]}" "${libs[@]}" -lm -o "$work/pc_c"
${CXX:-c++} -std=c++20 -Wall -Werror "$here/main.cpp" "${cflags[@]}" "${libs[@]}" -o "$work/pc_cpp"
${CC:-cc} -std=c11 "$here/main.c" "${cflags[@]}" "${static_libs[@]}" -o "$work/pc_c_static"
export LD_LIBRARY_PATH=$libdir
check "$work/pc_c"
check "$work/pc_cpp"
unset LD_LIBRARY_PATH
check "$work/pc_c_static"

if [[ -x $work/stage/bin/logitless ]]; then
  "$work/stage/bin/logitless" info >/dev/null
  echo "$work/stage/bin/logitless info: ran"
fi
