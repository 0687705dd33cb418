// SPDX-License-Identifier: MIT
//! Carrying out one send request, with this process as the adapter of both ends.
//!
//! Called by the send queue, which holds its lock. Nothing here waits: what cannot be done now is
//! answered by what it waits for, and tried again from the beginning.

use crate::access::{atomic, checked, copy, is_here, Atomic, Refused, Way};
use crate::connection::{untouch, Connection};
use crate::layout::{fault, flag, CARRIED};
use crate::mr::{access, check, owner_address};
use crate::process::Process;
use crate::qp::{Qp, MAX_SGE};
use crate::recv::unpack;
use crate::ring::{fence_after_locked, Full};
use crate::send::{Request, SendQueue, INLINE, SOLICITED};
use crate::stream;
use rdma_sys::{ibv_wc_opcode, ibv_wc_status, ibv_wr_opcode};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::Ordering;

/// Longest message of the port, bytes.
pub(crate) const MAX_MESSAGE: u64 = 1 << 30;
/// Up to this many bytes a copy through the bounce ring is cheaper than a look at the peer's
/// receive and a copy right into mapped pages.
const BOUNCE_MAPPED: usize = 1024;
/// The same against a copy by `process_vm_writev`.
const BOUNCE_CALL: usize = 4096;

/// What became of a request.
pub(crate) enum Step {
    /// Done; so many bytes.
    Done(u32),
    /// Failed, with this `ibv_wc_status`.
    Failed(u32),
    /// To be tried again.
    Wait(Stall),
}

/// What a request waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stall {
    /// A peer's QP that takes messages from this one.
    NotReady,
    /// A receive; the peer asks for this pause between two tries.
    Receive { wait_us: u32 },
    /// Room in the bounce ring.
    Room,
    /// The application to poll: it is [`AHEAD`] completions behind, in event mode.
    Poll,
}

/// How many send completions wait in a CQ with a channel before the next one does. An adapter takes
/// time; one that completes everything while it is posted would leave nothing to fire the next arm
/// of a program that polls one batch per event (perftest with many QPs).
const AHEAD: u64 = 16;

impl Stall {
    /// The `ibv_wc_status` of a request that has waited for this long enough.
    pub(crate) fn status(self) -> u32 {
        match self {
            Stall::Receive { .. } => ibv_wc_status::IBV_WC_RNR_RETRY_EXC_ERR,
            _ => ibv_wc_status::IBV_WC_RETRY_EXC_ERR,
        }
    }
}

/// A request's own memory, checked.
struct Gather {
    parts: [MaybeUninit<(*mut u8, usize)>; MAX_SGE as usize],
    count: usize,
    total: usize,
}

impl Gather {
    /// Resolves the list of `request`, which needs `rights` to its own memory.
    #[inline(always)]
    fn new(process: &Process, qp: &Qp, request: &Request<'_>, rights: u32) -> Result<Gather, Refused> {
        let mut gather = Gather { parts: [MaybeUninit::uninit(); MAX_SGE as usize], count: 0, total: 0 };
        for sge in request.sges.iter().filter(|sge| sge.length > 0) {
            let addr = if request.flags & INLINE != 0 {
                sge.addr
            } else {
                let map = &process.segment.map;
                match check(map, sge.lkey, qp.pd(), sge.addr, sge.length.into(), rights) {
                    Ok(mr) => owner_address(mr, sge.addr),
                    Err(_) => return Err(ibv_wc_status::IBV_WC_LOC_PROT_ERR),
                }
            };
            gather.parts[gather.count].write((addr as *mut u8, sge.length as usize));
            gather.count += 1;
            gather.total += sge.length as usize;
        }
        if gather.total as u64 > MAX_MESSAGE {
            return Err(ibv_wc_status::IBV_WC_LOC_LEN_ERR);
        }
        Ok(gather)
    }

    #[inline(always)]
    fn parts(&self) -> &[(*mut u8, usize)] {
        // SAFETY: the first `count` parts were written.
        unsafe { std::slice::from_raw_parts(self.parts.as_ptr().cast(), self.count) }
    }
}

/// Where the payload of a message is.
pub(crate) enum Payload {
    /// In the entry.
    Carried,
    /// In the bounce ring, from this place on.
    Bounced(u64),
    /// In the receive's own memory already, or nowhere.
    Placed,
}

/// Carries out `request`, the next one of `sq`.
#[inline]
pub(crate) fn execute(sq: &mut SendQueue, qp: &Qp, process: &Process, request: &Request<'_>) -> Step {
    if sq.connection.is_none() {
        sq.connection = Connection::establish(process, qp);
        if sq.connection.is_none() {
            ask_for_peer(process, qp.shared.dest.load(Ordering::Relaxed));
            sq.connection = Connection::establish(process, qp);
        }
    }
    let Some(conn) = &mut sq.connection else { return Step::Wait(Stall::NotReady) };
    if conn.peer.dead.load(Ordering::Relaxed) {
        return Step::Failed(ibv_wc_status::IBV_WC_RETRY_EXC_ERR);
    }
    if !sq.unpaced && qp.signals(request.flags) && qp.send_cq().paces(AHEAD) {
        return Step::Wait(Stall::Poll);
    }
    if !conn.receives() {
        conn.mark_stalled();
        if !conn.receives() {
            return Step::Wait(Stall::NotReady);
        }
    }
    let rights = match request.opcode {
        ibv_wr_opcode::IBV_WR_RDMA_READ
        | ibv_wr_opcode::IBV_WR_ATOMIC_CMP_AND_SWP
        | ibv_wr_opcode::IBV_WR_ATOMIC_FETCH_AND_ADD => access::LOCAL_WRITE,
        _ => 0,
    };
    let gather = match Gather::new(process, qp, request, rights) {
        Ok(gather) => gather,
        Err(status) => return Step::Failed(status),
    };
    match request.opcode {
        ibv_wr_opcode::IBV_WR_SEND | ibv_wr_opcode::IBV_WR_SEND_WITH_IMM => {
            send(conn, qp, process, request, &gather)
        }
        ibv_wr_opcode::IBV_WR_RDMA_READ => one_sided(conn, qp, request, &gather, Way::Read),
        ibv_wr_opcode::IBV_WR_RDMA_WRITE => one_sided(conn, qp, request, &gather, Way::Write),
        ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM => {
            if !conn.has_receive() && !wait_for_receive(conn) {
                return no_receive(conn);
            }
            match one_sided(conn, qp, request, &gather, Way::Write) {
                Step::Done(_) => message(conn, process, request, &gather, Payload::Placed),
                other => other,
            }
        }
        _ => remote_atomic(conn, qp, request, &gather),
    }
}

/// The peer's QP is not ready, or not there: asks it to say so when it is.
#[cold]
fn ask_for_peer(process: &Process, dest: u32) {
    let peer = process.peer(dest >> 12);
    if let Some(remote) = peer.as_ref().and_then(|peer| peer.qp(dest & 0xfff)) {
        remote.sender.0.stalled.swap(1, Ordering::SeqCst);
        fence_after_locked();
    }
}

/// Tells the receiver that a receive is wanted, and looks once more.
#[cold]
fn wait_for_receive(conn: &mut Connection) -> bool {
    conn.mark_stalled();
    conn.has_receive()
}

#[cold]
fn no_receive(conn: &Connection) -> Step {
    if !conn.receives() {
        return Step::Wait(Stall::NotReady);
    }
    Step::Wait(Stall::Receive { wait_us: conn.remote.rnr_wait_us.load(Ordering::Relaxed) })
}

/// A SEND.
#[inline(always)]
fn send(conn: &mut Connection, qp: &Qp, process: &Process, request: &Request<'_>, gather: &Gather) -> Step {
    if !conn.has_receive() && !wait_for_receive(conn) {
        return no_receive(conn);
    }
    if gather.total as u64 > u64::from(conn.min_bytes) {
        if let Err(status) = fits(conn, gather.total as u64) {
            return reject(conn, process, request, status);
        }
    }
    if gather.total <= CARRIED {
        return message(conn, process, request, gather, Payload::Carried);
    }
    conn.touch(qp.shared);
    let step = if conn.receives() {
        match long_payload(conn, gather) {
            Ok(payload) => message(conn, process, request, gather, payload),
            Err(Step::Failed(ibv_wc_status::IBV_WC_LOC_PROT_ERR)) => {
                untouch(qp.shared);
                return reject(conn, process, request, ibv_wc_status::IBV_WC_LOC_PROT_ERR);
            }
            Err(step) => step,
        }
    } else {
        Step::Wait(Stall::NotReady)
    };
    untouch(qp.shared);
    step
}

/// Whether the next receive can take `len` bytes; else the receiver's status.
#[cold]
fn fits(conn: &Connection, len: u64) -> Result<(), Refused> {
    let Some((entry, _)) = conn.next_receive() else { return Err(ibv_wc_status::IBV_WC_LOC_QP_OP_ERR) };
    if entry.bad.load(Ordering::Relaxed) != 0 {
        return Err(ibv_wc_status::IBV_WC_LOC_PROT_ERR);
    }
    if entry.bytes.load(Ordering::Relaxed) < len {
        return Err(ibv_wc_status::IBV_WC_LOC_LEN_ERR);
    }
    Ok(())
}

/// The next receive cannot take the message: it fails there with `status`, and the request here.
#[cold]
fn reject(conn: &mut Connection, process: &Process, request: &Request<'_>, status: u32) -> Step {
    let nothing = Gather { parts: [MaybeUninit::uninit(); MAX_SGE as usize], count: 0, total: 0 };
    let step = publish(conn, process, request, &nothing, Payload::Placed, status);
    if matches!(step, Step::Done(_)) {
        conn.accuse(fault::REQUEST);
        return Step::Failed(if status == ibv_wc_status::IBV_WC_LOC_LEN_ERR {
            ibv_wc_status::IBV_WC_REM_INV_REQ_ERR
        } else {
            ibv_wc_status::IBV_WC_REM_OP_ERR
        });
    }
    step
}

/// Brings a payload that no entry can carry to the peer. The connection touches.
fn long_payload(conn: &mut Connection, gather: &Gather) -> Result<Payload, Step> {
    let total = gather.total;
    if conn.streamed.is_some() {
        return stream::send(conn, gather.parts(), total as u64);
    }
    let roomy = total as u64 <= conn.bounce_len;
    if total <= BOUNCE_MAPPED && conn.has_room(total as u64) {
        return Ok(bounce(conn, gather));
    }
    let (here, reachable) = reach(conn, total as u64).map_err(Step::Failed)?;
    if here || (reachable && (total > BOUNCE_CALL || !conn.has_room(total as u64))) {
        place_directly(conn, gather).map_err(Step::Failed)?;
        return Ok(Payload::Placed);
    }
    if roomy {
        if !conn.has_room(total as u64) {
            conn.mark_stalled();
        }
        if conn.has_room(total as u64) {
            return Ok(bounce(conn, gather));
        }
        return Err(Step::Wait(Stall::Room));
    }
    stream::send(conn, gather.parts(), total as u64)
}

fn bounce(conn: &mut Connection, gather: &Gather) -> Payload {
    let at = conn.bounce_tail;
    for &(from, len) in gather.parts() {
        // SAFETY: a checked part of the application's memory; the caller saw that all fit.
        unsafe { conn.bounce(from, len) };
    }
    Payload::Bounced(at)
}

/// Whether the memory of the next receive can be reached: by mapped pages, and at all.
fn reach(conn: &Connection, total: u64) -> Result<(bool, bool), Refused> {
    let Some((entry, list)) = conn.next_receive() else { return Err(ibv_wc_status::IBV_WC_REM_OP_ERR) };
    let sges = entry.sges.load(Ordering::Relaxed) as usize;
    let (mut left, mut here) = (total, true);
    for sge in list.chunks_exact(2).take(sges) {
        let (addr, room, key) = unpack(sge);
        let n = left.min(room as u64);
        if n > 0 {
            let mr = checked(conn, key, addr, n, access::LOCAL_WRITE)
                .map_err(|_| ibv_wc_status::IBV_WC_LOC_PROT_ERR)?;
            here &= is_here(conn, mr, addr, n);
            left -= n;
        }
    }
    Ok((here, here || conn.peer.reachable))
}

/// Copies the payload right into the memory of the next receive.
fn place_directly(conn: &mut Connection, gather: &Gather) -> Result<(), Refused> {
    let Some((entry, list)) = conn.next_receive() else { return Err(ibv_wc_status::IBV_WC_REM_OP_ERR) };
    let sges = entry.sges.load(Ordering::Relaxed) as usize;
    let mut targets = list.chunks_exact(2).take(sges).map(unpack);
    let (mut addr, mut room, mut key) = (0, 0, 0);
    for &(from, len) in gather.parts() {
        let mut done = 0;
        while done < len {
            while room == 0 {
                (addr, room, key) = targets.next().ok_or(ibv_wc_status::IBV_WC_REM_INV_REQ_ERR)?;
            }
            let n = room.min(len - done);
            let mr = checked(conn, key, addr, n as u64, access::LOCAL_WRITE)
                .map_err(|_| ibv_wc_status::IBV_WC_LOC_PROT_ERR)?;
            // SAFETY: a checked part of the application's memory; the connection touches.
            unsafe { copy(conn, mr, key, addr, from.wrapping_add(done), n, Way::Write)? };
            (addr, room, done) = (addr + n as u64, room - n, done + n);
        }
    }
    Ok(())
}

/// Completes the next receive of the peer with a message whose payload is where it says.
#[inline(always)]
fn message(
    conn: &mut Connection,
    process: &Process,
    request: &Request<'_>,
    gather: &Gather,
    payload: Payload,
) -> Step {
    publish(conn, process, request, gather, payload, ibv_wc_status::IBV_WC_SUCCESS)
}

#[inline(always)]
fn publish(
    conn: &mut Connection,
    process: &Process,
    request: &Request<'_>,
    gather: &Gather,
    payload: Payload,
    status: u32,
) -> Step {
    let claim = match conn.ring.claim(&mut conn.cursor, process.segment.id) {
        Ok(claim) => claim,
        Err(Full) => {
            conn.accuse(fault::OVERFLOW);
            return Step::Failed(ibv_wc_status::IBV_WC_REM_OP_ERR);
        }
    };
    // After the claim, which is a full barrier: a peer that leaves the state waits for claims.
    if !conn.receives() {
        claim.void();
        if let Payload::Bounced(at) = payload {
            conn.bounce_tail = at;
        }
        conn.mark_stalled();
        return Step::Wait(Stall::NotReady);
    }
    let entry = claim.entry;
    let (mut kind, opcode) = match request.opcode {
        ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM => {
            (flag::RECV | flag::IMM, ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM)
        }
        ibv_wr_opcode::IBV_WR_SEND_WITH_IMM => (flag::RECV | flag::IMM, ibv_wc_opcode::IBV_WC_RECV),
        _ => (flag::RECV, ibv_wc_opcode::IBV_WC_RECV),
    };
    match payload {
        Payload::Carried => {
            kind |= flag::CARRIED;
            let mut words = [0_u64; CARRIED / 8];
            let mut at = 0;
            for &(from, len) in gather.parts() {
                // SAFETY: checked parts of the application's memory, `CARRIED` bytes together at
                // most.
                unsafe {
                    ptr::copy_nonoverlapping(from, words.as_mut_ptr().cast::<u8>().add(at), len);
                }
                at += len;
            }
            for (to, word) in entry.payload.iter().zip(words) {
                to.store(word, Ordering::Relaxed);
            }
        }
        Payload::Bounced(at) => {
            kind |= flag::BOUNCED;
            entry.id.store(at, Ordering::Relaxed);
        }
        Payload::Placed => {}
    }
    let index = conn.remote_index();
    entry.qp.store(index, Ordering::Relaxed);
    entry.len.store(gather.total as u32, Ordering::Relaxed);
    entry.imm.store(request.imm, Ordering::Relaxed);
    entry.kind.store(status | opcode << 8 | kind, Ordering::Relaxed);
    claim.publish();
    conn.sequence = conn.sequence.wrapping_add(1);
    conn.announce(request.flags & SOLICITED != 0 || status != ibv_wc_status::IBV_WC_SUCCESS);
    Step::Done(gather.total as u32)
}

/// A READ or WRITE.
fn one_sided(conn: &mut Connection, qp: &Qp, request: &Request<'_>, gather: &Gather, way: Way) -> Step {
    conn.touch(qp.shared);
    let result = transfer(conn, request, gather, way);
    untouch(qp.shared);
    finish(conn, result.map(|()| gather.total as u32))
}

fn transfer(conn: &mut Connection, request: &Request<'_>, gather: &Gather, way: Way) -> Result<(), Outcome> {
    if !conn.receives() {
        return Err(Outcome::NotReady);
    }
    if gather.total == 0 {
        return Ok(());
    }
    let rights = if way == Way::Read { access::REMOTE_READ } else { access::REMOTE_WRITE };
    let (key, mut addr) = (request.rkey, request.remote_addr);
    let mr = checked(conn, key, addr, gather.total as u64, rights).map_err(Outcome::Refused)?;
    for &(local, len) in gather.parts() {
        // SAFETY: a checked part of the application's memory; the connection touches.
        unsafe { copy(conn, mr, key, addr, local, len, way).map_err(Outcome::Refused)? };
        addr += len as u64;
    }
    Ok(())
}

/// Why a one-sided request was not carried out.
enum Outcome {
    NotReady,
    Refused(Refused),
}

/// An atomic.
fn remote_atomic(conn: &mut Connection, qp: &Qp, request: &Request<'_>, gather: &Gather) -> Step {
    if gather.total != 8 {
        return Step::Failed(ibv_wc_status::IBV_WC_LOC_LEN_ERR);
    }
    let what = if request.opcode == ibv_wr_opcode::IBV_WR_ATOMIC_FETCH_AND_ADD {
        Atomic::Add(request.compare_add)
    } else {
        Atomic::Swap(request.compare_add, request.swap)
    };
    conn.touch(qp.shared);
    let result = if !conn.receives() {
        Err(Outcome::NotReady)
    } else if !request.remote_addr.is_multiple_of(8) {
        Err(Outcome::Refused(ibv_wc_status::IBV_WC_REM_INV_REQ_ERR))
    } else {
        checked(conn, request.rkey, request.remote_addr, 8, access::REMOTE_ATOMIC)
            .and_then(|mr| atomic(conn, mr, request.rkey, request.remote_addr, what))
            .map_err(Outcome::Refused)
    };
    untouch(qp.shared);
    finish(
        conn,
        result.map(|was| {
            let (bytes, mut at) = (was.to_ne_bytes(), 0);
            for &(to, len) in gather.parts() {
                // SAFETY: a checked part of the application's memory; eight bytes together.
                unsafe { ptr::copy_nonoverlapping(bytes.as_ptr().add(at), to, len) };
                at += len;
            }
            8
        }),
    )
}

/// Ends a one-sided request; one that the peer refused makes the peer's QP fail too.
fn finish(conn: &Connection, result: Result<u32, Outcome>) -> Step {
    match result {
        Ok(bytes) => Step::Done(bytes),
        Err(Outcome::NotReady) => {
            conn.mark_stalled();
            Step::Wait(Stall::NotReady)
        }
        Err(Outcome::Refused(status)) => {
            if status == ibv_wc_status::IBV_WC_REM_ACCESS_ERR
                || status == ibv_wc_status::IBV_WC_REM_INV_REQ_ERR
            {
                conn.accuse(fault::ACCESS);
            }
            Step::Failed(status)
        }
    }
}
