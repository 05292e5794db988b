//! A server between any commands and any bytes of a client: what it counts stays within its limits,
//! and nothing panics.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::pair::{Setup, frame, object};
use bytes::BytesMut;
use rpc_core::proto::{Kind, ServerEvent};
use rpc_core::{ErrorKind, RpcError, Value};

pub(crate) fn run(script: &[u8]) {
    let pair = Setup::default().limits(64 << 10, 128 << 10, 20 << 10, 4).build();
    let (mut server, mut now) = (pair.server, pair.now);
    let mut input = BytesMut::new();
    let mut asked = BTreeSet::new();
    let mut script = script.iter().copied();
    while let Some(op) = script.next() {
        let argument = script.next().unwrap_or_default();
        match op % 8 {
            0 | 1 => {
                let body: Vec<u8> = script.by_ref().take(usize::from(argument % 64)).collect();
                let body = if argument & 64 == 0 { body } else { vec![0x93, 7, 0xc0, 0x91, 1] };
                let more = argument & 128 != 0;
                input.extend_from_slice(&frame(Kind::Request, u64::from(op >> 4), 0, more, &body, &[]));
            }
            2 => input.extend(script.by_ref().take(usize::from(argument))),
            3 => {
                if let Some(id) = asked.pop_first() {
                    let value = match argument % 4 {
                        0 => Err(RpcError::not_found("it")),
                        1 => Ok(Value::Bytes(vec![0; usize::from(argument) * 300].into())),
                        2 => Ok(object(argument.into())),
                        _ => Ok(Value::Null),
                    };
                    server.reply(id, value);
                }
            }
            4 => {
                now += Duration::from_millis(u64::from(argument) * 20);
                if server.handle_timeout(now).is_err() {
                    return;
                }
            }
            5 => {
                server.stage();
                let mut slices = [std::io::IoSlice::new(&[]); 2];
                let count = server.slices(&mut slices);
                let len: usize = slices[..count].iter().map(|slice| slice.len()).sum();
                server.advance(len.min(usize::from(argument) * 100), now);
            }
            6 if argument == 0 => server.go_away(&RpcError::new(ErrorKind::Draining, "going")),
            7 if argument == 0 => server.close(None),
            _ => {
                let kind = [Kind::Credit, Kind::Cancel, Kind::Free, Kind::Ping, Kind::Pong][usize::from(argument) % 5];
                let body: Vec<u8> = script.by_ref().take(12).collect();
                let body = if matches!(kind, Kind::Credit) { &body[..] } else { &[] };
                input.extend_from_slice(&frame(kind, 1, 0, false, body, &[]));
            }
        }
        loop {
            match server.handle_input(&mut input, now, &mut |_, _, _, _| None) {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Protocol);
                    server.close(Some(&error));
                    return;
                }
            }
            while let Some(event) = server.poll_event() {
                if let ServerEvent::Request { id, .. } = event {
                    assert!(asked.insert(id), "{id} was asked twice");
                }
            }
            assert!(server.in_flight() <= 4);
        }
        assert_eq!(server.in_flight(), asked.len());
    }
}
