// SPDX-License-Identifier: MIT
//! The manual page: one page for all commands, from the definition of the command line and the
//! table of settings, so that neither can be forgotten.
//!
//! Committed as docs/man/fastwaked.1; a test compares it with what this renders.

use std::fmt::Write;

use anyhow::Result;
use clap::{Command, CommandFactory};
use clap_mangen::Man;
use fastwake::settings::TABLE;

use crate::cli::Cli;
use crate::libraries::LIBDIR_ENV;

const EXIT_STATUS: &str = "\
.SH \"EXIT STATUS\"
0 on success, 1 otherwise; the reason is on standard error. \\fBrun\\fR ends as its program does, with
127 where it was not found and 126 where it could not be executed. \\fBcompare\\fR ends with 0 where no
run failed, whatever the figures. \\fBruns diff\\fR ends with 1 where something regressed.
";

const EXAMPLES: &str = "\
.SH EXAMPLES
.nf
fastwaked run \\-\\- ./app
fastwaked run \\-\\-soft \\-\\-stats \\-\\- ib_send_lat \\-e
fastwaked compare \\-\\-rounds 9 \\-\\-json \\- \\-\\- ib_send_lat \\-s 64
fastwaked compare \\-\\-client agent://10.0.0.2:18600 \\-\\-token\\-file token \\-\\- ib_read_lat
fastwaked runs diff 2026\\-01\\-01\\-fw_soft0\\-ib_send_lat 2026\\-01\\-02\\-fw_soft0\\-ib_send_lat
.fi
";

/// Renders the page in roff.
///
/// # Errors
/// What the renderer reports.
pub(crate) fn page() -> Result<String> {
    let mut cli = Cli::command();
    cli.build();
    let man = Man::new(cli.clone());
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_options_section(&mut page)?;
    let mut page = String::from_utf8(page)?;
    page.push_str(".SH COMMANDS\n");
    for command in cli.get_subcommands().filter(|c| !c.is_hide_set()) {
        page.push_str(&section(command, false)?);
    }
    page.push_str(&environment());
    page.push_str(EXIT_STATUS);
    page.push_str(EXAMPLES);
    page.push_str(".SH \"SEE ALSO\"\nib_send_lat(1), ibv_rc_pingpong(1), ibv_get_cq_event(3), ld.so(8)\n");
    Ok(page)
}

/// A command and the commands below it. What all commands take stands at the top of the page, what
/// a command hands down to those below it at the command.
fn section(command: &Command, nested: bool) -> Result<String> {
    let name = command.get_bin_name().unwrap_or_else(|| command.get_name());
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    let mut out = format!(".SS \"{}\"\n{}.\n", escaped(name), escaped(about.trim_end_matches('.')));
    for argument in command.get_arguments().filter(|a| shown(a, nested)) {
        let heading = match argument.get_long() {
            Some(long) => format!("\\fB{}\\fR", escaped(&format!("--{long}"))),
            None => String::new(),
        };
        let takes_value = argument.get_action().takes_values();
        let value = argument.get_value_names().and_then(|names| names.first()).filter(|_| takes_value);
        let value = value.map_or(String::new(), |value| format!("\\fI{}\\fR", escaped(value)));
        let space = if heading.is_empty() || value.is_empty() { "" } else { " " };
        let _ = writeln!(out, ".TP\n{heading}{space}{value}");
        let help = argument.get_help().map(ToString::to_string).unwrap_or_default();
        let mut notes = vec![format!("{}.", escaped(help.trim_end_matches('.')))];
        let defaults: Vec<_> = argument.get_default_values().iter().map(|v| v.to_string_lossy()).collect();
        if takes_value && !defaults.is_empty() {
            notes.push(format!("Default: {}.", escaped(&defaults.join(", "))));
        }
        let choices: Vec<String> =
            argument.get_possible_values().iter().map(|v| v.get_name().to_owned()).collect();
        if takes_value && !choices.is_empty() {
            notes.push(format!("One of {}.", escaped(&choices.join(", "))));
        }
        let _ = writeln!(out, "{}", notes.join(" "));
    }
    for below in command.get_subcommands().filter(|c| !c.is_hide_set()) {
        out.push_str(&section(below, true)?);
    }
    Ok(out)
}

fn shown(argument: &clap::Arg, nested: bool) -> bool {
    let everywhere = ["help", "verbose"].contains(&argument.get_id().as_str());
    let above = nested && argument.is_global_set();
    !(argument.is_hide_set() || everywhere || above)
}

fn environment() -> String {
    let mut out = String::from(".SH ENVIRONMENT\n");
    let own = [
        (LIBDIR_ENV, "The folder that holds the preload libraries, in place of the usual ones."),
        ("RUST_LOG", "What fastwaked itself logs, in env_logger's syntax."),
    ];
    for (name, help) in own {
        let _ = writeln!(out, ".TP\n\\fB{name}\\fR\n{}", escaped(help));
    }
    out.push_str(".PP\nRead by the shim and the soft device in the program that is run:\n");
    for row in TABLE {
        let default = if row.default.is_empty() { "empty" } else { row.default };
        let values = escaped(&format!("Takes {}. Default: {default}.", row.values));
        let _ = writeln!(out, ".TP\n\\fB{}\\fR\n{} {values}", row.name, escaped(row.help));
    }
    out
}

/// Text as roff wants it: dashes are minus signs, and no line begins with a control character.
fn escaped(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-");
    if text.starts_with(['.', '\'']) {
        format!("\\&{text}")
    } else {
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_in_docs_is_that_of_this_command_line() {
        let committed = include_str!("../../docs/man/fastwaked.1");
        assert!(committed == page().unwrap(), "out of date: fastwaked man > docs/man/fastwaked.1");
    }

    #[test]
    fn every_command_option_and_setting_is_on_the_page() {
        let page = page().unwrap();
        for word in ["fastwaked run", "fastwaked runs diff", "--client-fastwaked", "FW_MODE", "FW_SOFT_DIR"] {
            assert!(page.contains(&escaped(word)), "{word}");
        }
        assert!(!page.contains("raw\\-peer"), "hidden commands stay hidden");
    }

    #[test]
    fn no_line_is_taken_for_a_macro_by_accident() {
        assert_eq!(escaped(".x-y"), "\\&.x\\-y");
        let known =
            [".TH", ".SH", ".SS", ".TP", ".PP", ".nf", ".fi", ".ie", ".el", ".br", ".RS", ".RE", ".IP"];
        for line in page().unwrap().lines().filter(|l| l.starts_with('.')) {
            assert!(known.iter().any(|k| line.starts_with(k)), "{line}");
        }
    }
}
