#!/bin/sh
# SPDX-License-Identifier: MIT
# Links a preload library with exactly the symbols, and the symbol versions, of its table.
#   link.sh TABLE ARCHIVE OUTPUT.so
# rustc's own cdylib link ignores a version script and exports every #[no_mangle]; an unversioned
# ibv_* would also capture callers of the IBVERBS_1.0 functions, whose structs differ. Hence by hand:
# one object of the whole archive, everything but the table's names made local, then cc -shared.
set -eu
table=$1 archive=$2 out=$3
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

sed -e 's/#.*//' "$table" | awk 'NF' > "$tmp/rows"
awk '{ print $1 }' "$tmp/rows" > "$tmp/keep"
# The nodes in order of appearance; IBVERBS_1.1 inherits nothing that the linker would need.
awk '$2 != "-" { if (!($2 in names)) order[++n] = $2; names[$2] = names[$2] " " $1 ";" }
     END { for (i = 1; i <= n; i++) print order[i] " { global:" names[order[i]] " };" }' \
    "$tmp/rows" > "$tmp/map"

${LD:-ld} -r --whole-archive "$archive" -o "$tmp/all.o"
${OBJCOPY:-objcopy} --keep-global-symbols="$tmp/keep" "$tmp/all.o" "$tmp/kept.o"
# shellcheck disable=SC2086
${CC:-cc} -shared -o "$out.new" "$tmp/kept.o" \
    -Wl,-soname,"$(basename "$out")" -Wl,--version-script="$tmp/map" -Wl,--gc-sections \
    -Wl,-z,now -Wl,-z,relro -Wl,--no-undefined -Wl,--as-needed -lgcc_s -lpthread -ldl -lm -lc

# Every name of the table, and nothing else, is exported.
nm -D --defined-only "$out.new" | awk '$2 != "A" { sub(/@.*/, "", $3); print $3 }' | sort -u > "$tmp/have"
sort -u "$tmp/keep" > "$tmp/want"
if ! diff "$tmp/want" "$tmp/have" > "$tmp/diff"; then
    echo "$out: exports differ from $table (< wanted, > found):" >&2
    cat "$tmp/diff" >&2
    exit 1
fi
mv "$out.new" "$out"
