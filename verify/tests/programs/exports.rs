// SPDX-License-Identifier: MIT
//! What the built libraries export and need: exactly their tables, versions included.
//!
//! An unversioned `ibv_*` would also capture callers of the IBVERBS_1.0 functions, whose structs
//! differ, and a NEEDED libibverbs would load it into every bash.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use object::elf::{FileHeader64, DT_NEEDED, DT_SONAME, SHN_UNDEF, STB_LOCAL};
use object::read::elf::{Dyn, FileHeader, Sym};
use object::Endianness;

struct Library {
    /// `name@version`, or `name@-` for a symbol without one.
    exports: BTreeSet<String>,
    needed: Vec<String>,
    soname: Option<String>,
}

fn read(file: &str) -> Library {
    let path = crate::stage::libraries().join(file);
    let data = fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let elf = FileHeader64::<Endianness>::parse(&*data).expect("an ELF file");
    let endian = elf.endian().expect("an endianness");
    let sections = elf.sections(endian, &*data).expect("sections");
    let symbols = sections.symbols(endian, &*data, object::elf::SHT_DYNSYM).expect("dynamic symbols");
    let versions = sections.versions(endian, &*data).expect("versions").expect("a version table");
    let mut exports = BTreeSet::new();
    for (index, symbol) in symbols.enumerate() {
        let name = symbol.name(endian, symbols.strings()).expect("a name");
        let absolute = symbol.st_shndx(endian) == object::elf::SHN_ABS;
        if symbol.st_shndx(endian) == SHN_UNDEF || symbol.st_bind() == STB_LOCAL || absolute {
            continue;
        }
        let version = versions
            .version(versions.version_index(endian, index))
            .expect("a version index")
            .map_or("-".to_owned(), |version| String::from_utf8_lossy(version.name()).into_owned());
        exports.insert(format!("{}@{version}", String::from_utf8_lossy(name)));
    }
    let (mut needed, mut soname) = (Vec::new(), None);
    let (entries, strings) = sections
        .dynamic(endian, &*data)
        .expect("a dynamic section")
        .map(|(entries, link)| {
            let strings = sections.strings(endian, &*data, link).expect("its strings");
            (entries, strings)
        })
        .expect("a dynamic section");
    for entry in entries {
        let text = || {
            let name = entry.string(endian, strings).expect("a string");
            String::from_utf8_lossy(name).into_owned()
        };
        match entry.tag32(endian) {
            Some(DT_NEEDED) => needed.push(text()),
            Some(DT_SONAME) => soname = Some(text()),
            _ => {}
        }
    }
    Library { exports, needed, soname }
}

/// The rows of a table: name, version or `-`.
fn table(file: &str) -> BTreeSet<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    text.lines()
        .map(|line| line.split('#').next().unwrap_or(""))
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            Some(format!("{}@{}", words.next()?, words.next()?))
        })
        .collect()
}

#[test]
fn the_shim_exports_its_table_with_its_versions() {
    assert_eq!(read("libfastwake_shim.so").exports, table("../shim/hooks.table"));
}

#[test]
fn the_soft_device_exports_its_table_with_its_versions() {
    assert_eq!(read("libfastwake_softdev.so").exports, table("softdev/exports.table"));
}

#[test]
fn no_verb_is_exported_without_a_version() {
    for file in ["libfastwake_shim.so", "libfastwake_softdev.so"] {
        for symbol in read(file).exports {
            assert!(!(symbol.starts_with("ibv_") && symbol.ends_with("@-")), "{file}: {symbol}");
        }
    }
}

#[test]
fn neither_library_needs_libibverbs() {
    for file in ["libfastwake_shim.so", "libfastwake_softdev.so"] {
        let needed = read(file).needed;
        assert!(!needed.is_empty(), "{file} needs not even libc?");
        assert!(!needed.iter().any(|name| name.contains("ibverbs")), "{file}: {needed:?}");
    }
}

#[test]
fn each_library_is_known_by_its_name() {
    for file in ["libfastwake_shim.so", "libfastwake_softdev.so"] {
        assert_eq!(read(file).soname.as_deref(), Some(file));
    }
}

#[test]
fn the_fake_has_the_versions_of_the_real_library() {
    let exports = read("apps/fake/libibverbs.so.1").exports;
    for symbol in [
        "ibv_get_cq_event@IBVERBS_1.0",
        "ibv_get_cq_event@IBVERBS_1.1",
        "ibv_create_comp_channel@IBVERBS_1.0",
        "ibv_create_cq@IBVERBS_1.1",
    ] {
        assert!(exports.contains(symbol), "no {symbol} in {exports:?}");
    }
}
