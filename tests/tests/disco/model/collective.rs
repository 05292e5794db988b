//! A collective in the interpreter.

use super::data::Data;
use super::program::Kind;
use super::session::Fault;
use super::slot::{ModelTensor, Slot, Trouble, WRONG};

/// Returns the output of a collective on each member of one scope, or the reason why it is
/// poisoned.
pub(crate) fn collective(
    kind: Kind,
    members: &[u32],
    from: &[&Slot],
    to: Option<Vec<&Slot>>,
) -> Vec<Result<Slot, Trouble>> {
    let n = members.len();
    let kind_of = |trouble: &Trouble| match trouble {
        Trouble::Own(kind) => *kind,
        Trouble::Inherited(fault) => fault.kind,
    };
    // Members without an input fail by themselves, and the others because of the first of them.
    let poisoned = |troubles: &[Option<Trouble>], origin: usize| -> Vec<Result<Slot, Trouble>> {
        let kind_of_origin = kind_of(troubles[origin].as_ref().unwrap());
        let fault = Fault { worker: members[origin], command: kind.command(), kind: kind_of_origin };
        let outcome = |own: &Option<Trouble>| Err(own.clone().unwrap_or(Trouble::Inherited(fault.clone())));
        troubles.iter().map(outcome).collect()
    };
    let result_shape = |tensor: &ModelTensor| match kind {
        Kind::Allreduce(_) | Kind::Broadcast | Kind::AllToAll => Ok(tensor.shape.clone()),
        Kind::Allgather | Kind::Gather => Ok([&[n as i64], &tensor.shape[..]].concat()),
        Kind::Scatter | Kind::ReduceScatter(_) => match tensor.shape.split_first() {
            Some((first, rest)) if *first == n as i64 => Ok(rest.to_vec()),
            _ => Err(WRONG),
        },
    };
    let needs_from = |rank: usize| !kind.is_one_sided() || rank == 0;
    let needs_to = |rank: usize| kind != Kind::Gather || rank == 0;
    let sources: Vec<Result<Option<ModelTensor>, Trouble>> =
        (0..n).map(|rank| if needs_from(rank) { from[rank].tensor().map(Some) } else { Ok(None) }).collect();
    let fresh = to.is_none();
    if fresh && kind.is_one_sided() {
        // The layout is exchanged first, and with it every possible error.
        let announced = sources[0].clone().and_then(|source| result_shape(&source.unwrap()));
        if let Err(trouble) = announced {
            let mut troubles = vec![None; n];
            troubles[0] = Some(trouble);
            return poisoned(&troubles, 0);
        }
    }
    let make = |tensor: &ModelTensor| {
        let shape = result_shape(tensor)?;
        let len = shape.iter().product::<i64>() as usize;
        Ok(ModelTensor::new(tensor.get().zeros(len), &shape))
    };
    let targets: Vec<Result<Option<ModelTensor>, Trouble>> = (0..n)
        .map(|rank| match &to {
            _ if !needs_to(rank) => match (&to, &sources[rank]) {
                // The member checks its own source all the same.
                (None, Ok(Some(source))) => make(source).map(|_| None),
                _ => Ok(None),
            },
            Some(to) => to[rank].tensor().map(Some),
            None if kind.is_one_sided() => make(sources[0].as_ref().unwrap().as_ref().unwrap()).map(Some),
            None => match &sources[rank] {
                Ok(source) => make(source.as_ref().unwrap()).map(Some),
                Err(trouble) => Err(trouble.clone()),
            },
        })
        .collect();
    // Factors by which source and destination have more elements than the call counts.
    let (from_times, to_times) = match kind {
        Kind::ReduceScatter(_) | Kind::Scatter => (n, 1),
        Kind::Allgather | Kind::Gather => (1, n),
        Kind::AllToAll => (n, n),
        Kind::Allreduce(_) | Kind::Broadcast => (1, 1),
    };
    // Type and count of each rank's call, or its trouble.
    let mut calls = Vec::new();
    for rank in 0..n {
        let call = sources[rank].clone().and_then(|source| {
            let target = targets[rank].clone()?;
            if let (Some(source), Some(target)) = (&source, &target)
                && !source.get().same_type(&target.get())
            {
                return Err(WRONG);
            }
            let mut counts = [(&source, from_times), (&target, to_times)]
                .into_iter()
                .filter_map(|(tensor, times)| Some((tensor.as_ref()?.len(), times)))
                .map(|(len, times)| if len % times == 0 { Ok(len / times) } else { Err(WRONG) });
            let first = counts.next().unwrap()?;
            for other in counts {
                if other? != first {
                    return Err(WRONG);
                }
            }
            let either = source.as_ref().or(target.as_ref()).unwrap();
            Ok((matches!(either.get(), Data::F32(_)), first))
        });
        calls.push(call);
    }
    let mut healthy = calls.iter().filter_map(|call| call.as_ref().ok());
    let agreed = healthy.next().copied();
    if healthy.any(|call| Some(*call) != agreed) {
        return calls.into_iter().map(|call| Err(call.err().unwrap_or(WRONG))).collect();
    }
    if let Some(origin) = calls.iter().position(Result::is_err) {
        let troubles: Vec<_> = calls.into_iter().map(Result::err).collect();
        return poisoned(&troubles, origin);
    }
    let (_, count) = agreed.unwrap();
    let inputs: Vec<Option<Data>> =
        sources.into_iter().map(|source| source.unwrap().map(|tensor| tensor.get())).collect();
    let all = || inputs.iter().map(|input| input.clone().unwrap()).collect::<Vec<_>>();
    let share = |data: &Data, rank: usize| data.slice(rank * count, count);
    (0..n)
        .map(|rank| {
            let result = match kind {
                Kind::Allreduce(op) => Data::reduce(&all(), op),
                Kind::ReduceScatter(op) => share(&Data::reduce(&all(), op), rank),
                Kind::Allgather | Kind::Gather => Data::concat(&all()),
                Kind::Broadcast => inputs[0].clone().unwrap(),
                Kind::Scatter => share(inputs[0].as_ref().unwrap(), rank),
                Kind::AllToAll => Data::concat(&all().iter().map(|data| share(data, rank)).collect::<Vec<_>>()),
            };
            Ok(match (targets[rank].as_ref().unwrap(), &to) {
                (Some(target), to) => {
                    target.set(result);
                    to.as_ref().map_or_else(|| Slot::Tensor(target.clone()), |to| to[rank].clone())
                }
                (None, Some(to)) => to[rank].clone(),
                (None, None) => Slot::Null,
            })
        })
        .collect()
}
