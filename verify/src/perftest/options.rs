// SPDX-License-Identifier: MIT
//! perftest's options: which take a value, and which a comparison sets itself, reads or refuses.
//!
//! One table, from the `--help` of the eight programs of perftest 4.5. An option that is not in it
//! is refused: whether it takes a value, and whether the agent may pass it on, would be a guess.

/// What a comparison does with an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// Passed on as it is.
    Pass,
    /// Set by the comparison for each run; one given is dropped.
    Ours,
    /// `-d`: names the device.
    Device,
    /// `-x`: names the GID index.
    Gid,
    /// `-n`: the number of iterations.
    Iterations,
    /// Refused, for this reason.
    Refused(&'static str),
}

/// An option of perftest.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PerftestOption {
    /// Its letter, or a space where it has none.
    pub short: char,
    /// Its long name.
    pub long: &'static str,
    /// Whether it takes a value.
    pub value: bool,
    /// What becomes of it.
    pub usage: Use,
}

const SIZES: &str = "it runs many sizes in one go; choose one by -s";
const DURATION: &str = "perftest refuses a duration together with events; choose a number by -n";
const SAMPLES: &str = "it prints every sample, of which a comparison has no use";
const FORMAT: &str = "it changes the form of the output that a comparison reads";
const FILES: &str = "it reads or writes files, on the client's host too";
const NO_RUN: &str = "it runs no test";

const fn flag(short: char, long: &'static str, usage: Use) -> PerftestOption {
    PerftestOption { short, long, value: false, usage }
}

const fn with_value(short: char, long: &'static str, usage: Use) -> PerftestOption {
    PerftestOption { short, long, value: true, usage }
}

/// Every option.
pub(crate) const TABLE: &[PerftestOption] = &[
    flag('e', "events", Use::Ours),
    flag('F', "CPU-freq", Use::Ours),
    flag('C', "report-cycles", Use::Ours),
    with_value('p', "port", Use::Ours),
    with_value('d', "ib-dev", Use::Device),
    with_value('x', "gid-index", Use::Gid),
    with_value('n', "iters", Use::Iterations),
    flag('a', "all", Use::Refused(SIZES)),
    with_value('D', "duration", Use::Refused(DURATION)),
    flag(' ', "run_infinitely", Use::Refused(DURATION)),
    flag(' ', "cpu_util", Use::Refused(DURATION)),
    flag('H', "report-histogram", Use::Refused(SAMPLES)),
    flag('U', "report-unsorted", Use::Refused(SAMPLES)),
    with_value(' ', "output", Use::Refused(FORMAT)),
    flag(' ', "report-both", Use::Refused(FORMAT)),
    flag(' ', "report-per-port", Use::Refused(FORMAT)),
    flag('O', "dualport", Use::Refused(FORMAT)),
    flag(' ', "out_json", Use::Refused(FILES)),
    with_value(' ', "out_json_file", Use::Refused(FILES)),
    with_value(' ', "mmap", Use::Refused(FILES)),
    with_value(' ', "mmap-offset", Use::Refused(FILES)),
    with_value(' ', "kek_path", Use::Refused(FILES)),
    with_value(' ', "credentials_path", Use::Refused(FILES)),
    with_value(' ', "data_enc_key_app_path", Use::Refused(FILES)),
    with_value('W', "report-counters", Use::Refused(FILES)),
    flag('h', "help", Use::Refused(NO_RUN)),
    flag('V', "version", Use::Refused(NO_RUN)),
    with_value('A', "atomic_type", Use::Pass),
    flag('b', "bidirectional", Use::Pass),
    with_value('c', "connection", Use::Pass),
    with_value('f', "margin", Use::Pass),
    flag('g', "mcg", Use::Pass),
    with_value('i', "ib-port", Use::Pass),
    with_value('I', "inline_size", Use::Pass),
    with_value('l', "post_list", Use::Pass),
    with_value('L', "hop_limit", Use::Pass),
    with_value('m', "mtu", Use::Pass),
    with_value('M', "MGID", Use::Pass),
    flag('N', "noPeak", Use::Pass),
    with_value('o', "outs", Use::Pass),
    with_value('q', "qp", Use::Pass),
    with_value('Q', "cq-mod", Use::Pass),
    with_value('r', "rx-depth", Use::Pass),
    flag('R', "rdma_cm", Use::Pass),
    with_value('s', "size", Use::Pass),
    with_value('S', "sl", Use::Pass),
    with_value('t', "tx-depth", Use::Pass),
    with_value('T', "tos", Use::Pass),
    with_value('u', "qp-timeout", Use::Pass),
    with_value('w', "limit_bw", Use::Pass),
    with_value('X', "vector", Use::Pass),
    with_value('y', "limit_msgrate", Use::Pass),
    flag('z', "com_rdma_cm", Use::Pass),
    with_value(' ', "burst_size", Use::Pass),
    flag(' ', "disable_pcie_relaxed", Use::Pass),
    with_value(' ', "dlid", Use::Pass),
    flag(' ', "dont_xchg_versions", Use::Pass),
    with_value(' ', "force-link", Use::Pass),
    with_value(' ', "inline_recv", Use::Pass),
    flag(' ', "ipv6", Use::Pass),
    with_value(' ', "latency_gap", Use::Pass),
    with_value(' ', "log_dci_streams", Use::Pass),
    with_value(' ', "log_active_dci_streams", Use::Pass),
    flag(' ', "mr_per_qp", Use::Pass),
    flag(' ', "odp", Use::Pass),
    flag(' ', "perform_warm_up", Use::Pass),
    with_value(' ', "pkey_index", Use::Pass),
    with_value(' ', "rate_limit", Use::Pass),
    with_value(' ', "rate_limit_type", Use::Pass),
    with_value(' ', "rate_units", Use::Pass),
    with_value(' ', "recv_post_list", Use::Pass),
    flag(' ', "report_gbits", Use::Pass),
    with_value(' ', "retry_count", Use::Pass),
    flag(' ', "reversed", Use::Pass),
    with_value(' ', "source_ip", Use::Pass),
    with_value(' ', "tclass", Use::Pass),
    with_value(' ', "typical_pkt_size", Use::Pass),
    flag(' ', "use-srq", Use::Pass),
    flag(' ', "use_hugepages", Use::Pass),
    flag(' ', "use_old_post_send", Use::Pass),
    with_value(' ', "wait_destroy", Use::Pass),
];

/// The option with that letter.
pub(crate) fn short(letter: char) -> Option<&'static PerftestOption> {
    TABLE.iter().find(|o| o.short == letter && letter != ' ')
}

/// The option with that long name.
pub(crate) fn long(name: &str) -> Option<&'static PerftestOption> {
    TABLE.iter().find(|o| o.long == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_letter_and_no_name_stands_for_two_options() {
        for option in TABLE {
            let same =
                |o: &&PerftestOption| o.long == option.long || (o.short == option.short && o.short != ' ');
            assert_eq!(TABLE.iter().filter(same).count(), 1, "{}", option.long);
        }
    }
}
