// SPDX-License-Identifier: MIT
//! The functions below ours: what the program would have called without us.
//!
//! Names are looked up with their version, because a plain `dlsym` may return the oldest of several
//! (glibc before 2.36 does for RTLD_NEXT). The real `dlsym` and `dlvsym` are themselves hidden by
//! our exports of these names, so they are read out of the dynamic section of the C library.

use std::ffi::{c_char, c_int, c_void, CStr};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// Versions under which a function of libc is looked up, newest first; then without.
const LIBC: &[&CStr] = &[c"GLIBC_2.34", c"GLIBC_2.3.2", c"GLIBC_2.2.5", c"GLIBC_2.17"];
/// Versions of libibverbs in use.
const VERBS: &[&CStr] = &[c"IBVERBS_1.1", c"IBVERBS_1.0"];

/// A function below ours, looked up when it is first needed.
pub(crate) struct Real {
    name: &'static CStr,
    versions: &'static [&'static CStr],
    found: AtomicPtr<c_void>,
}

impl Real {
    /// A function of libibverbs, or of a device below us that stands in for it.
    pub(crate) const fn verbs(name: &'static CStr) -> Real {
        Real { name, versions: VERBS, found: AtomicPtr::new(ptr::null_mut()) }
    }

    /// A function of libc.
    pub(crate) const fn libc(name: &'static CStr) -> Real {
        Real { name, versions: LIBC, found: AtomicPtr::new(ptr::null_mut()) }
    }

    /// Its address; null where it is nowhere.
    #[inline(always)]
    pub(crate) fn address(&self) -> *mut c_void {
        let found = self.found.load(Ordering::Relaxed);
        if found.is_null() {
            self.find()
        } else {
            found
        }
    }

    #[cold]
    fn find(&self) -> *mut c_void {
        let next = self.versions.iter().map(|version| dlvsym(libc::RTLD_NEXT, self.name, version));
        let mut found = next.into_iter().find(|p| !p.is_null()).unwrap_or(ptr::null_mut());
        if found.is_null() && ptr::eq(self.versions, VERBS) {
            // The program opened libibverbs itself, out of RTLD_NEXT's sight.
            // SAFETY: a constant name; NOLOAD loads nothing.
            let library =
                unsafe { libc::dlopen(c"libibverbs.so.1".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
            if !library.is_null() {
                let inside = self.versions.iter().map(|version| dlvsym(library, self.name, version));
                found = inside.into_iter().find(|p| !p.is_null()).unwrap_or(ptr::null_mut());
            }
        } else if found.is_null() {
            found = dlsym(libc::RTLD_NEXT, self.name);
        }
        self.found.store(found, Ordering::Relaxed);
        found
    }
}

/// Calls the function below ours; `$fallback` where there is none.
macro_rules! call_real {
    ($real:expr, fn($($type:ty),* $(,)?) -> $ret:ty, ($($arg:expr),* $(,)?), $fallback:expr) => {{
        let address = $real.address();
        if address.is_null() {
            $fallback
        } else {
            // SAFETY: the address is that of the C function of this name, whose type this is.
            let real: unsafe extern "C" fn($($type),*) -> $ret = unsafe { std::mem::transmute(address) };
            // SAFETY: the arguments are the caller's own.
            unsafe { real($($arg),*) }
        }
    }};
}
pub(crate) use call_real;

type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;
type Dlvsym = unsafe extern "C" fn(*mut c_void, *const c_char, *const c_char) -> *mut c_void;

/// The real `dlsym` and `dlvsym`. The stubs of these names jump through them.
pub(crate) static DLSYM: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
pub(crate) static DLVSYM: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

/// The real `dlsym`, from this library's place in the order of libraries.
pub(crate) fn dlsym(handle: *mut c_void, name: &CStr) -> *mut c_void {
    find_loader();
    let address = DLSYM.load(Ordering::Relaxed);
    if address.is_null() {
        return ptr::null_mut();
    }
    // SAFETY: `find_loader` found the C library's function of this name and type.
    unsafe { std::mem::transmute::<*mut c_void, Dlsym>(address)(handle, name.as_ptr()) }
}

/// The real `dlvsym`, from this library's place in the order of libraries.
pub(crate) fn dlvsym(handle: *mut c_void, name: &CStr, version: &CStr) -> *mut c_void {
    find_loader();
    let address = DLVSYM.load(Ordering::Relaxed);
    if address.is_null() {
        return ptr::null_mut();
    }
    // SAFETY: as in `dlsym`.
    unsafe { std::mem::transmute::<*mut c_void, Dlvsym>(address)(handle, name.as_ptr(), version.as_ptr()) }
}

/// Finds the real `dlsym` and `dlvsym`; called by their stubs, too, before anything else ran.
pub(crate) extern "C" fn find_loader() {
    if DLVSYM.load(Ordering::Relaxed).is_null() {
        // SAFETY: the callback has the type that dl_iterate_phdr wants and keeps nothing.
        unsafe { libc::dl_iterate_phdr(Some(look_into), ptr::null_mut()) };
    }
}

/// Looks for both functions in one loaded object, if it is the C library (or the old libdl).
unsafe extern "C" fn look_into(info: *mut libc::dl_phdr_info, _size: usize, _data: *mut c_void) -> c_int {
    // SAFETY: the loader passes a valid description with a NUL-terminated name (or none).
    let info = unsafe { &*info };
    if info.dlpi_name.is_null() {
        return 0;
    }
    // SAFETY: as above.
    let name = unsafe { CStr::from_ptr(info.dlpi_name) }.to_bytes();
    let file = name.rsplit(|&b| b == b'/').next().unwrap_or(name);
    if file != b"libc.so.6" && file != b"libdl.so.2" {
        return 0;
    }
    // SAFETY: the object is loaded, and the C library is never unloaded.
    if let Some(symbols) = unsafe { Symbols::of(info) } {
        for (name, slot) in [(c"dlsym", &DLSYM), (c"dlvsym", &DLVSYM)] {
            if let Some(address) = symbols.find(name) {
                slot.store(address, Ordering::Relaxed);
            }
        }
    }
    0
}

/// The dynamic symbol table of a loaded object, searched through its GNU hash table.
struct Symbols {
    base: usize,
    symbols: *const libc::Elf64_Sym,
    strings: *const c_char,
    hash: *const u32,
}

const DT_STRTAB: u64 = 5;
const DT_SYMTAB: u64 = 6;
const DT_GNU_HASH: u64 = 0x6fff_fef5;

impl Symbols {
    /// # Safety
    /// `info` describes an object that stays loaded.
    unsafe fn of(info: &libc::dl_phdr_info) -> Option<Symbols> {
        // SAFETY: the loader vouches for the program headers.
        let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()) };
        let dynamic = headers.iter().find(|header| header.p_type == libc::PT_DYNAMIC)?;
        let base = info.dlpi_addr as usize;
        let mut entry = (base + dynamic.p_vaddr as usize) as *const [u64; 2];
        let (mut symbols, mut strings, mut hash) = (0, 0, 0);
        loop {
            // SAFETY: the dynamic section ends with a null tag.
            let [tag, value] = unsafe { entry.read() };
            match tag {
                0 => break,
                DT_STRTAB => strings = value as usize,
                DT_SYMTAB => symbols = value as usize,
                DT_GNU_HASH => hash = value as usize,
                _ => {}
            }
            // SAFETY: as above.
            entry = unsafe { entry.add(1) };
        }
        // glibc has relocated these in place; musl has not.
        let at = |value: usize| if value < base { base + value } else { value };
        (symbols != 0 && strings != 0 && hash != 0).then(|| Symbols {
            base,
            symbols: at(symbols) as *const _,
            strings: at(strings) as *const _,
            hash: at(hash) as *const _,
        })
    }

    fn find(&self, name: &CStr) -> Option<*mut c_void> {
        let wanted = name.to_bytes().iter().fold(5381u32, |h, &b| h.wrapping_mul(33).wrapping_add(b.into()));
        // SAFETY: the layout of DT_GNU_HASH: four words, the Bloom filter, the buckets, the chains;
        // a chain ends with an odd word, and chains parallel the symbols from `first` on.
        unsafe {
            let (buckets, first, bloom) =
                (self.hash.read(), self.hash.add(1).read(), self.hash.add(2).read());
            let bucket = self.hash.add(4 + 2 * bloom as usize);
            let chain = bucket.add(buckets as usize);
            let mut index = bucket.add((wanted % buckets.max(1)) as usize).read();
            if index < first {
                return None;
            }
            loop {
                let hash = chain.add((index - first) as usize).read();
                let symbol = &*self.symbols.add(index as usize);
                if hash | 1 == wanted | 1 && CStr::from_ptr(self.strings.add(symbol.st_name as usize)) == name
                {
                    return Some((self.base + symbol.st_value as usize) as *mut c_void);
                }
                if hash & 1 == 1 {
                    return None;
                }
                index += 1;
            }
        }
    }
}
