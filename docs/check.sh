#!/bin/sh
# SPDX-License-Identifier: MIT
# Fails where a document names a path of this repository that does not exist.
set -eu
cd "$(dirname "$0")/.."
bad=0
for doc in README.md docs/*.md perftest-runs/README.md; do
    for path in $(grep -oE '`(core|shim|verify|docs|kernel|perftest-runs)/[A-Za-z0-9_./-]+`' "$doc" | tr -d '`' | sort -u); do
        if [ ! -e "$path" ]; then
            echo "$doc names $path, which does not exist" >&2
            bad=1
        fi
    done
done
exit $bad
