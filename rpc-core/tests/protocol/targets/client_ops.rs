//! A client between any commands and any bytes of a server: every request ends once, and nothing
//! panics.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::pair::{Setup, call, frame};
use bytes::BytesMut;
use rpc_core::proto::{ClientEvent, Kind};
use rpc_core::{ErrorKind, Handle, Lane};

pub(crate) fn run(script: &[u8]) {
    let pair = Setup::default().limits(64 << 10, 128 << 10, 20 << 10, 4).build();
    let (mut client, mut now) = (pair.client, pair.now);
    let mut input = BytesMut::new();
    let (mut submitted, mut answered) = (0_u64, BTreeSet::new());
    let mut script = script.iter().copied();
    while let Some(op) = script.next() {
        let argument = script.next().unwrap_or_default();
        match op % 9 {
            0 | 1 => {
                submitted += 1;
                let mut request = call(u32::from(argument % 4), usize::from(argument) * 250);
                if argument % 4 == 3 {
                    request = request.on(Lane::CONCURRENT);
                }
                request.deadline = (argument & 16 != 0).then(|| now + Duration::from_millis(argument.into()));
                if let rpc_core::proto::Admission::Refused(id, _) = client.submit(submitted, request, submitted, now) {
                    assert!(answered.insert(id));
                }
            }
            2 => client.cancel(argument.into()),
            3 => client.release([Handle::from_bits(argument.into())]),
            4 => {
                now += Duration::from_millis(u64::from(argument) * 20);
                if let Err(error) = client.handle_timeout(now) {
                    client.fail(error);
                }
            }
            5 => {
                // A reply that is well-formed as a frame.
                let body: Vec<u8> = script.by_ref().take(usize::from(argument % 32)).collect();
                let id = u64::from(op >> 4);
                let kind =
                    [Kind::Reply, Kind::Error, Kind::Credit, Kind::GoAway, Kind::Ping][usize::from(argument >> 5) % 5];
                let more = argument & 128 != 0 && matches!(kind, Kind::Reply | Kind::Error);
                input.extend_from_slice(&frame(kind, id, 0, more, &body, &[]));
            }
            6 => input.extend(script.by_ref().take(usize::from(argument))),
            7 => {
                client.stage();
                let mut slices = [std::io::IoSlice::new(&[]); 2];
                let count = client.slices(&mut slices);
                let len: usize = slices[..count].iter().map(|slice| slice.len()).sum();
                client.advance(len.min(usize::from(argument) * 100), now);
            }
            _ if argument == 0 => client.shutdown(None),
            _ => {}
        }
        if let Err(error) = client.handle_input(&mut input, now) {
            assert_eq!(error.kind(), ErrorKind::Protocol);
            client.fail(error);
        }
        take(&mut client, &mut answered);
    }
    client.handle_end_of_stream(input.len());
    take(&mut client, &mut answered);
    assert_eq!(answered.len() as u64, submitted);
    assert!(client.is_quiet() && client.ended().is_some());
}

fn take(client: &mut rpc_core::proto::ClientEndpoint<u64>, answered: &mut BTreeSet<u64>) {
    while let Some(event) = client.poll_event() {
        if let ClientEvent::Reply(id, _) = event {
            assert!(answered.insert(id), "{id} was answered twice");
        }
    }
}
