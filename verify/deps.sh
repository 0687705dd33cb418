#!/bin/sh
# SPDX-License-Identifier: MIT
# Installs what building and testing FastWake need on Debian 12 or newer, where it may; otherwise
# says which one command does. Called by make; silent and quick when nothing is missing.
set -eu

missing=
need() { # need PACKAGE PROOF...: the package is there if any of the proofs exists
    package=$1
    shift
    for proof in "$@"; do
        case $proof in
        /*) for path in $proof; do [ -e "$path" ] && return; done ;;
        *) command -v "$proof" > /dev/null 2>&1 && return ;;
        esac
    done
    missing="$missing $package"
}

need gcc gcc
need g++ g++
need make make
need binutils objcopy
need pkg-config pkg-config
need libibverbs-dev /usr/include/infiniband/verbs.h
need librdmacm-dev /usr/include/rdma/rdma_cma.h
need ibverbs-utils ibv_rc_pingpong
need perftest ib_send_lat
need util-linux taskset
# rdma-sys pins a bindgen that needs libclang 15 or older.
need libclang-14-dev '/usr/lib/llvm-1[345]/lib/libclang.so'

if ! command -v cargo > /dev/null 2>&1; then
    echo "cargo is missing: install Rust 1.88 or newer (rustup, or your distribution's package)" >&2
    exit 1
fi
[ -z "$missing" ] && exit 0

if ! command -v apt-get > /dev/null 2>&1; then
    echo "missing (Debian's names):$missing" >&2
    exit 1
fi
if [ "$(id -u)" = 0 ]; then
    run=
elif sudo -n true 2> /dev/null; then
    run=sudo
else
    echo "missing packages; please run:  sudo apt-get install -y$missing" >&2
    exit 1
fi
echo "installing:$missing"
$run apt-get update -qq || true
# shellcheck disable=SC2086
$run env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing
