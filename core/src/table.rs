// SPDX-License-Identifier: MIT
//! A map from the address of a verbs object to what FastWake knows of it.
//!
//! `ibv_poll_cq` asks it on every call, so a look-up takes no lock and normally one cache line. The
//! map is an open-addressed table that is replaced, and never freed, when it grows: a reader may
//! still walk the old one. Growing doubles, so what is left behind is less than what is in use.

use std::marker::PhantomData;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use parking_lot::Mutex;

const FREE: usize = 0;
/// A slot whose key was removed: a probe goes on past it, an insertion may take it.
const REMOVED: usize = 1;

struct Slot {
    key: AtomicUsize,
    value: AtomicUsize,
}

struct Slots {
    slots: Box<[Slot]>,
    /// 64 − log2 of the number of slots: the hash is the product's top bits.
    shift: u32,
}

impl Slots {
    fn new(log2: u32) -> Self {
        let slots = (0..1usize << log2)
            .map(|_| Slot { key: AtomicUsize::new(FREE), value: AtomicUsize::new(0) })
            .collect();
        Slots { slots, shift: 64 - log2 }
    }

    fn first(&self, key: usize) -> usize {
        ((key as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> self.shift) as usize
    }

    fn next(&self, index: usize) -> usize {
        (index + 1) & (self.slots.len() - 1)
    }

    /// Puts `key` in; the caller holds the table's lock and has made sure that a slot is free. True
    /// where a slot was taken that was free before.
    fn put(&self, key: usize, value: usize) -> bool {
        let mut index = self.first(key);
        let mut place = None;
        loop {
            let slot = &self.slots[index];
            match slot.key.load(Ordering::Relaxed) {
                FREE => break,
                k if k == key => {
                    place = Some(index);
                    break;
                }
                REMOVED => {
                    place.get_or_insert(index);
                }
                _ => {}
            }
            index = self.next(index);
        }
        let slot = &self.slots[place.unwrap_or(index)];
        slot.value.store(value, Ordering::Relaxed);
        // Release: pairs with the Acquire in `get`, so that who sees the key sees its value.
        slot.key.store(key, Ordering::Release);
        place.is_none()
    }
}

/// The map, from addresses of `K`, which are never followed, to accounts that live for ever.
pub struct Table<K, V: 'static> {
    current: AtomicPtr<Slots>,
    /// Keys that occupy slots, removed ones included.
    used: Mutex<usize>,
    keys: PhantomData<fn(*mut K)>,
    values: PhantomData<&'static V>,
}

impl<K, V: 'static> Table<K, V> {
    /// An empty map that has allocated nothing.
    pub const fn new() -> Self {
        Table {
            current: AtomicPtr::new(ptr::null_mut()),
            used: Mutex::new(0),
            keys: PhantomData,
            values: PhantomData,
        }
    }

    /// What is known of `key`.
    #[inline]
    pub fn get(&self, key: *mut K) -> Option<&'static V> {
        let current = self.current.load(Ordering::Acquire);
        if current.is_null() {
            return None;
        }
        // SAFETY: a published table is never freed.
        let table = unsafe { &*current };
        let mut index = table.first(key as usize);
        loop {
            // SAFETY: `first` and `next` stay below the length, a power of two.
            let slot = unsafe { table.slots.get_unchecked(index) };
            match slot.key.load(Ordering::Acquire) {
                k if k == key as usize => {
                    // SAFETY: `insert` put a reference there that lives for ever, before the key.
                    return unsafe { (slot.value.load(Ordering::Relaxed) as *const V).as_ref() };
                }
                FREE => return None,
                _ => index = table.next(index),
            }
        }
    }

    /// Makes `value` what is known of `key`, an address that is neither null nor odd.
    pub fn insert(&self, key: *mut K, value: &'static V) {
        let mut used = self.used.lock();
        let mut current = self.current.load(Ordering::Relaxed);
        // SAFETY: a published table is never freed.
        let full = unsafe { current.as_ref() }.is_none_or(|t| (*used + 1) * 2 > t.slots.len());
        if full {
            current = self.grow(current, &mut used);
        }
        // SAFETY: as above; the lock is held and half of the slots at least are free.
        *used += usize::from(unsafe { &*current }.put(key as usize, ptr::from_ref(value) as usize));
    }

    /// Forgets `key`.
    pub fn remove(&self, key: *mut K) {
        let _used = self.used.lock();
        let current = self.current.load(Ordering::Relaxed);
        // SAFETY: a published table is never freed.
        let Some(table) = (unsafe { current.as_ref() }) else { return };
        let mut index = table.first(key as usize);
        loop {
            let slot = &table.slots[index];
            match slot.key.load(Ordering::Relaxed) {
                FREE => return,
                k if k == key as usize => return slot.key.store(REMOVED, Ordering::Release),
                _ => index = table.next(index),
            }
        }
    }

    /// Publishes a copy of `old` without its removed keys and with room for as many again.
    fn grow(&self, old: *mut Slots, used: &mut usize) -> *mut Slots {
        let live = |slot: &&Slot| slot.key.load(Ordering::Relaxed) > REMOVED;
        // SAFETY: a published table is never freed.
        let old: &[Slot] = unsafe { old.as_ref() }.map_or(&[], |t| &t.slots);
        let count = old.iter().filter(live).count();
        let new = Box::new(Slots::new((count * 4).next_power_of_two().max(64).trailing_zeros()));
        for slot in old.iter().filter(live) {
            new.put(slot.key.load(Ordering::Relaxed), slot.value.load(Ordering::Relaxed));
        }
        *used = count;
        let new = Box::into_raw(new);
        self.current.store(new, Ordering::Release);
        new
    }
}

impl<K, V: 'static> Default for Table<K, V> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    #[test]
    fn behaves_as_a_map_through_growth_and_removal() {
        let table: Table<u64, u64> = Table::new();
        let values: &'static [u64] = Box::leak((0..20_000).collect());
        let mut model = HashMap::new();
        let mut seed = 1u64;
        for value in values {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let key = ((seed >> 33) % 700 + 1) * 64;
            if seed >> 20 & 3 == 0 {
                table.remove(key as *mut u64);
                model.remove(&key);
            } else {
                table.insert(key as *mut u64, value);
                model.insert(key, value);
            }
            let probe = ((seed >> 40) % 700 + 1) * 64;
            assert_eq!(table.get(probe as *mut u64), model.get(&probe).copied());
        }
    }

    #[test]
    fn an_empty_table_knows_nothing() {
        assert!(Table::<u8, u8>::new().get(64 as *mut u8).is_none());
    }
}
