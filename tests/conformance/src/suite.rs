//! The list of all clauses, and the macros that make tests of them.

/// Makes a module of tests, two for each clause, over the fixture that an expression makes. See the
/// [crate](crate#examples).
///
/// Attributes of the tests of the blocking form may follow, for suites whose time is limited:
/// `conformance!(along = fixture(), blocking: #[cfg(feature = "long")])`.
#[macro_export]
macro_rules! conformance {
    ($name:ident = $fixture:expr $(, blocking: $(#[$blocking:meta])+)?) => {
        $crate::clauses! { $name = $fixture, in $crate::clauses $(, blocking: $(#[$blocking])+)?;
            functions {
                a_function_is_found_by_its_name_and_called
                an_unknown_function_is_not_found_at_the_origin
                every_value_comes_back_as_it_went
                floats_keep_their_bits
                bytes_larger_than_a_chunk_come_back
                lists_and_maps_nest_to_the_limit
                maps_hold_objects
                typed_maps_have_each_key_once
                typed_calls_convert_arguments_and_returns
                arguments_that_do_not_fit_are_refused_with_their_place
                returns_that_do_not_fit_are_refused_and_freed
                structs_travel_packed
                functions_are_returned_and_passed
                each_reference_owns_a_handle_of_its_own
            }
            handles {
                objects_keep_their_identity
                dropping_the_last_reference_frees_the_object
                thousands_of_objects_come_and_go
                an_object_in_use_outlives_its_handle
                a_reference_may_be_dropped_right_behind_a_call
                freeing_twice_is_an_invalid_handle
                stale_handles_name_nothing
                forged_handles_name_nothing
                handles_of_another_session_are_refused
                a_handle_of_the_wrong_kind_is_refused
                unclaimed_replies_are_freed
                futures_dropped_at_every_await_point_leak_nothing
                the_limit_on_handles_is_an_error_and_leaks_nothing
            }
            tensors {
                a_fresh_tensor_is_zero
                memory_is_counted_until_the_last_reference_goes
                views_share_storage
                bad_layouts_are_refused
                impossible_allocations_are_refused
                memory_is_aligned_as_requested
                a_virtual_device_says_where_a_tensor_is
                the_limit_on_memory_is_an_error
                tensors_are_copied_among_each_other
                two_readers_hold_a_tensor_at_once
                a_writer_waits_for_readers_on_other_lanes
                readers_and_copies_wait_for_a_writer_on_another_lane
                calls_with_the_same_tensors_in_another_order_do_not_deadlock
                a_conflict_within_one_call_is_busy
                a_tensor_freed_during_a_call_stays_until_the_call_is_done
                devices_tell_their_attributes
                streams_are_created_set_waited_for_and_freed
                one_stream_waits_for_another
                vectors_go_up_and_come_down
            }
            order {
                a_lane_keeps_the_order_of_a_thousand_pipelined_calls
                copies_keep_their_place_among_calls
                a_lane_that_is_held_up_holds_up_no_other
                an_asynchronous_function_holds_its_lane
                concurrent_calls_run_beside_each_other
                every_lane_keeps_its_own_order
                requests_that_fail_keep_their_place
                a_function_learns_its_lane
                lanes_share_the_objects
            }
            pipelining {
                ten_thousand_calls_pass_a_small_queue_once_each
                each_reply_goes_to_its_request
                a_full_queue_delays_admission_and_resumes
                a_long_queue_of_concurrent_calls_is_admitted
                a_queue_that_is_full_of_bytes_delays_admission
                a_request_larger_than_the_queue_is_admitted_alone
                requests_dropped_while_they_wait_for_room_never_run
                every_request_gets_exactly_one_reply
                copies_pass_a_small_queue
            }
            pipes {
                calls_take_the_results_of_earlier_ones
                results_may_be_objects
                an_error_is_carried_along_the_chain
                a_cancelled_request_has_no_result
                a_result_belongs_to_its_lane_and_session
                a_dropped_pipe_frees_its_result
                names_of_no_result_are_refused
                results_that_are_kept_are_bounded
            }
            deadlines {
                the_deadline_of_a_running_call_fails_the_caller_at_once
                the_deadline_does_not_wait_for_the_function
                a_call_that_is_still_queued_at_its_deadline_never_runs
                a_deadline_that_has_passed_already_runs_nothing
                the_deadline_reaches_the_function_as_time_remaining
                a_deadline_that_is_kept_does_nothing
                a_copy_fails_at_its_deadline
                a_deadline_passes_while_a_call_waits_for_a_tensor
                a_call_that_is_dropped_before_it_begins_never_runs
                the_result_of_a_call_that_is_dropped_while_it_runs_is_freed
                a_function_learns_that_its_caller_has_gone
                a_cancelled_request_that_had_not_begun_is_answered_as_cancelled
                a_cancelled_request_that_runs_is_answered_with_its_own_reply
                a_request_that_is_cancelled_while_it_waits_for_a_tensor_never_runs
            }
            errors {
                application_errors_keep_their_facts
                errors_that_a_function_passes_on_keep_their_kind
                a_panic_is_an_error_with_its_message_and_place
                a_panic_harms_nobody_else
                an_object_that_panics_when_it_is_freed_harms_nobody
                each_caller_gets_its_own_error
                nested_calls_are_not_queued
            }
            copies {
                every_size_arrives_as_it_was_sent
                parts_are_copied_and_nothing_else_is_touched
                views_are_copied_from_where_they_start
                ranges_that_do_not_fit_are_refused
                progress_grows_to_the_whole
                a_buffer_that_is_passed_in_becomes_the_result
                the_blocking_form_reads_into_a_slice
                a_cancelled_copy_leaves_the_session_in_order
                copies_on_several_lanes_run_beside_each_other
                a_copy_keeps_its_tensor
                a_tensor_is_sent_to_another_session
                a_send_within_a_session_is_a_copy_there
            }
            callbacks {
                a_closure_takes_and_returns_every_value
                closures_convert_arguments_and_returns
                arguments_that_do_not_fit_a_closure_are_refused_and_freed
                each_call_runs_the_closure_once
                a_closure_reads_and_returns_tensors
                a_closure_calls_and_returns_functions
                errors_of_a_closure_keep_their_facts
                a_panic_in_a_closure_harms_nobody_else
                closures_nest
                two_callbacks_call_each_other
                a_closure_runs_for_several_lanes_at_once
                a_request_on_the_waiting_lane_is_misuse
                a_callback_that_is_dropped_fails_its_calls
                a_call_keeps_the_callback_that_it_was_given
                a_deadline_passes_while_the_closure_runs
                a_shutdown_lets_go_of_callbacks
            }
            modules {
                a_registered_module_is_loaded_and_its_functions_called
                a_function_outlives_the_reference_to_its_module
                what_there_is_not_is_not_found
                a_session_is_a_module_that_is_passed_and_returned
            }
            threads {
                a_blocking_form_inside_a_runtime_is_misuse
                several_threads_share_one_session
                threads_and_tasks_share_one_session
                a_call_may_be_started_here_and_waited_for_there
            }
            ends {
                a_shutdown_completes_what_was_admitted_and_refuses_the_rest
                a_shutdown_waits_for_requests_that_waited_for_room
                after_the_end_everything_fails_with_the_reason
                all_who_wait_for_the_end_hear_of_it
                a_shutdown_frees_all_that_the_session_held
                dropping_a_session_frees_all_that_it_held
                a_function_that_runs_learns_that_its_session_is_gone
                the_end_of_one_session_does_not_touch_another
            }
        }
    };
}

/// Makes tests of the listed clauses, which are functions in modules of `in PATH`: for clauses of
/// your own.
///
/// A clause is an `async fn(&Harness)`. The module of tests bears the name before `=`. Attributes
/// of the tests of the blocking form may follow, as in [`conformance`](crate::conformance).
#[macro_export]
macro_rules! clauses {
    ($name:ident = $fixture:expr, in $clauses:path $(, blocking: $(#[$blocking:meta])+)?; $($list:tt)*) => {
        $crate::clauses! { [$($(#[$blocking])+)?] $name = $fixture, in $clauses; $($list)* }
    };
    ($blocking:tt $name:ident = $fixture:expr, in $clauses:path; $($module:ident { $($clause:ident)* })*) => {
        mod $name {
            use super::*;
            use $clauses as listed;

            fn fixture() -> std::sync::Arc<dyn $crate::fixture::Fixture> {
                std::sync::Arc::new($fixture)
            }

            $(mod $module {
                $(mod $clause {
                    fn run(form: $crate::harness::Form) {
                        let name = concat!(stringify!($name), "::", stringify!($module), "::", stringify!($clause));
                        let fixture = super::super::fixture;
                        $crate::harness::run(name, fixture, form, |harness| {
                            Box::pin(super::super::listed::$module::$clause(harness))
                        });
                    }

                    #[test]
                    fn asynchronous() {
                        run($crate::harness::Form::Async);
                    }

                    $crate::with_attributes! { $blocking
                        #[test]
                        fn blocking() {
                            run($crate::harness::Form::Blocking);
                        }
                    }
                })*
            })*
        }
    };
}

/// Puts attributes in front of an item. A macro cannot repeat a list of its own in another one.
#[doc(hidden)]
#[macro_export]
macro_rules! with_attributes {
    ([$($attributes:tt)*] $item:item) => {
        $($attributes)* $item
    };
}

#[cfg(test)]
mod tests {
    /// A clause that is in no list is checked nowhere.
    #[test]
    fn every_clause_is_listed() {
        let list = include_str!("suite.rs");
        let sources = [
            include_str!("clauses/callbacks.rs"),
            include_str!("clauses/copies.rs"),
            include_str!("clauses/deadlines.rs"),
            include_str!("clauses/ends.rs"),
            include_str!("clauses/errors.rs"),
            include_str!("clauses/functions.rs"),
            include_str!("clauses/handles.rs"),
            include_str!("clauses/modules.rs"),
            include_str!("clauses/order.rs"),
            include_str!("clauses/pipelining.rs"),
            include_str!("clauses/pipes.rs"),
            include_str!("clauses/tensors.rs"),
            include_str!("clauses/threads.rs"),
        ];
        for source in sources {
            for line in source.lines() {
                let Some(clause) = line.strip_prefix("pub async fn ").and_then(|line| line.split('(').next()) else {
                    continue;
                };
                assert!(list.lines().any(|line| line.trim() == clause), "{clause} is in no list");
            }
        }
    }
}
