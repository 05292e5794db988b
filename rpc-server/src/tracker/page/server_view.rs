//! The page of one server: its registration, what it has reported, devices, clients and errors.

use std::fmt::{self, Display, Write};

use rpc_transports::tracker::{DeviceDetails, Reach, ServerDetails, ServerSummary};

use super::PoolView;
use super::markup::{Text, columns, document, table};
use super::sections::{self, KeyLink};
use crate::cli::size;
use crate::tracker::display::{self, draining, for_people, has, holder, next_leases};

/// Returns the page of a server; `None` if no server has this number.
pub(super) fn page(view: &PoolView, id: u64) -> Option<String> {
    let summary = &view.summary;
    let server = summary.servers.iter().find(|server| server.id == id)?;
    let content = |to: &mut String| {
        writeln!(to, "<h2 class=\"subject\">Server {}</h2>", Text(&server.name))?;
        facts(to, server)?;
        match &server.details {
            Some(details) => {
                devices(to, &details.devices)?;
                clients(to, server)?;
                errors(to, details)?;
            }
            None => {
                clients(to, server)?;
                to.write_str(
                    "<p class=\"nothing\">The server has not reported its devices and errors: it has just \
                     registered, or its version does not report them.</p>\n",
                )?;
            }
        }
        let (name, key) = (&server.name, &server.key);
        let is_its = |name_of: &str, key_of: &str| name_of == name && key_of == key;
        let events: Vec<_> = summary.events.iter().filter(|event| is_its(&event.name, &event.key)).collect();
        sections::events(to, &events)
    };
    Some(document(&server.name, summary, |_| Ok(()), content))
}

fn facts(to: &mut String, server: &ServerSummary) -> fmt::Result {
    to.write_str("<dl class=\"facts\">\n")?;
    let fact =
        |to: &mut String, name: &str, value: &dyn Display| writeln!(to, "<div><dt>{name}</dt><dd>{value}</dd></div>");
    let reach = match &server.reach {
        Reach::Untried => "not tried yet",
        Reach::Reached => "reached",
        Reach::Unreachable { .. } => "not reached",
        _ => "unknown",
    };
    let mut address = String::new();
    sections::address(&mut address, server)?;
    fact(to, "Key", &KeyLink(&server.key))?;
    fact(to, "Slots free", &format_args!("{} of {}", server.free, server.capacity))?;
    if let Some(of) = &server.draining {
        fact(to, "Given to clients", &format_args!("no: {}", Text(draining(of))))?;
    }
    fact(to, "Last heard", &format_args!("{} ago", for_people(server.heard_ago_ms)))?;
    fact(to, "Registered for", &for_people(server.registered_for_ms))?;
    if let Some(ServerDetails { version, uptime_ms, sessions, memory_bytes, .. }) = &server.details {
        fact(to, "Version", &Text(version))?;
        fact(to, "Up", &for_people(*uptime_ms))?;
        fact(to, "Sessions", sessions)?;
        fact(to, "Memory of sessions", &size(*memory_bytes))?;
    }
    fact(to, "Reachability", &reach)?;
    fact(to, "Address", &address)?;
    fact(to, "Registered from", &Text(&server.peer))?;
    fact(to, "Has", &Text(has(server)))?;
    to.write_str("</dl>\n")
}

fn devices(to: &mut String, devices: &[DeviceDetails]) -> fmt::Result {
    let columns = columns(["Device", "Name", "#Memory in use", "#Utilization", "#Clock", "Lease", "Waiting"]);
    table(to, "devices-table", "Devices", &columns, "The server reports no devices.", devices, |to, device| {
        let DeviceDetails { device, name, total_memory, available_memory, utilization_percent, clock_mhz, lease } =
            device;
        let name = name.as_deref().unwrap_or_default();
        write!(to, "<td>{}</td><td>{}</td><td class=\"number\">", Text(device), Text(name))?;
        match (available_memory, total_memory) {
            (Some(available), Some(total)) => {
                write!(to, "{} of {}", size(total.saturating_sub(*available)), size(*total))?;
            }
            (None, Some(total)) => write!(to, "of {}", size(*total))?,
            (Some(available), None) => write!(to, "{} free", size(*available))?,
            (None, None) => {}
        }
        to.write_str("</td><td class=\"number\">")?;
        if let Some(percent) = utilization_percent {
            write!(to, "{percent} % <meter max=\"100\" value=\"{percent}\"></meter>")?;
        }
        to.write_str("</td><td class=\"number\">")?;
        if let Some(clock) = clock_mhz {
            write!(to, "{clock} MHz")?;
        }
        to.write_str("</td>")?;
        match lease {
            Some(leased) => {
                write!(to, "<td>{}</td><td>{}</td>", Text(display::lease(leased)), Text(next_leases(leased)))
            }
            None => to.write_str("<td>free</td><td></td>"),
        }
    })
}

fn clients(to: &mut String, server: &ServerSummary) -> fmt::Result {
    let columns = columns(["Client"]);
    table(to, "clients-table", "Clients", &columns, "No client uses the server.", &server.holders, |to, held| {
        write!(to, "<td>{}</td>", Text(holder(held)))
    })
}

fn errors(to: &mut String, details: &ServerDetails) -> fmt::Result {
    let columns = columns(["#When", "Error"]);
    let nothing = "The server has reported no errors.";
    table(to, "errors-table", "Last errors", &columns, nothing, &details.errors, |to, error| {
        write!(to, "<td class=\"number\">{} ago</td><td>{}</td>", for_people(error.ago_ms), Text(&error.text))
    })
}
