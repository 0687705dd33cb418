# SPDX-License-Identifier: MIT
# FastWake: everything is built into target/release. `make help` lists the targets.
CARGO ?= cargo
DESTDIR ?=
PREFIX ?= /usr/local
CARGO_TARGET_DIR ?= target
export CARGO_TARGET_DIR
OUT := $(CARGO_TARGET_DIR)/release
export FASTWAKE_LIBDIR = $(abspath $(OUT))
# rdma-sys pins a bindgen that needs libclang 15 or older.
LIBCLANG_PATH ?= $(firstword $(wildcard /usr/lib/llvm-14/lib /usr/lib/llvm-15/lib /usr/lib/llvm-13/lib))
export LIBCLANG_PATH

.DEFAULT_GOAL := build
.PHONY: build apps demo test lint test-long bench install uninstall deps help clean

build: deps ## build everything that is shipped
	$(CARGO) build --release --locked --workspace
	sh shim/link.sh shim/hooks.table $(OUT)/libfastwake_shim.a $(OUT)/libfastwake_shim.so
	sh shim/link.sh verify/softdev/exports.table $(OUT)/libfastwake_softdev.a $(OUT)/libfastwake_softdev.so

apps: deps ## build the event-mode test programs and the scripted libibverbs
	$(MAKE) -C verify/apps OUT=$(abspath $(OUT))/apps

demo: build ## compare polling, event mode and FastWake on this machine (no RDMA needed)
	$(OUT)/fastwaked compare --soft -- ib_send_lat

test: lint build apps ## all tests that take minutes
	$(CARGO) test --locked --workspace

lint: deps ## formatting, lints, paths in the documentation
	$(CARGO) fmt --all --check
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings
	sh docs/check.sh

test-long: build apps ## the tests that take an hour
	FASTWAKE_LONG=1 $(CARGO) test --locked --workspace

bench: build ## the speed of the parts, and of stock perftest programs
	$(CARGO) bench --locked -p fastwake
	$(OUT)/fastwaked compare --soft --rounds 15 -- ib_send_lat
	$(OUT)/fastwaked compare --soft --rounds 9 -- ib_send_bw

install: ## install into $(DESTDIR)$(PREFIX); after `make build`
	install -D -m 755 $(OUT)/fastwaked $(DESTDIR)$(PREFIX)/bin/fastwaked
	install -D -m 755 $(OUT)/libfastwake_shim.so $(DESTDIR)$(PREFIX)/lib/libfastwake_shim.so
	install -D -m 755 $(OUT)/libfastwake_softdev.so $(DESTDIR)$(PREFIX)/lib/libfastwake_softdev.so
	install -D -m 644 docs/man/fastwaked.1 $(DESTDIR)$(PREFIX)/share/man/man1/fastwaked.1

uninstall: ## remove what `make install` installed
	rm -f $(DESTDIR)$(PREFIX)/bin/fastwaked $(DESTDIR)$(PREFIX)/share/man/man1/fastwaked.1 \
	    $(DESTDIR)$(PREFIX)/lib/libfastwake_shim.so $(DESTDIR)$(PREFIX)/lib/libfastwake_softdev.so

deps: ## install the packages that building and testing need
	@sh verify/deps.sh

clean: ## remove what was built
	$(CARGO) clean

help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
