# SPDX-License-Identifier: MIT
CARGO ?= cargo
DESTDIR ?=
PREFIX ?= /usr/local
# rdma-sys pins a bindgen that needs libclang 15 or older.
export LIBCLANG_PATH ?= $(firstword $(wildcard /usr/lib/llvm-14/lib /usr/lib/llvm-15/lib /usr/lib/llvm-13/lib))
OUT := target/release

.DEFAULT_GOAL := build
.PHONY: build libs apps demo test test-long bench install uninstall deps help clean

build: libs apps ## build everything that is shipped, into target/release

libs: | deps
	$(CARGO) build --release --locked --workspace
	sh shim/link.sh shim/hooks.table $(OUT)/libfastwake_shim.a $(OUT)/libfastwake_shim.so
	sh shim/link.sh verify/softdev/exports.table $(OUT)/libfastwake_softdev.a $(OUT)/libfastwake_softdev.so

help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
