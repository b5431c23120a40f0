package copilot

// This file is the way of events: the Event, the ring that a session's subscribers share, the Subscription with its
// cursor, and the iter.Seq2 sequences over it. The typed payloads stand at the end.
//
// Its one idea: the publisher writes each event once into one bounded ring and never waits; every subscriber has a cursor of its
// own and pays for its own slowness with a counted gap. Nothing here starts a goroutine.

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"iter"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Event is one session event as the server sent it. Data is shared by all subscribers and must not be changed.
type Event struct {
	ID        string
	Type      EventType
	Timestamp time.Time // zero when the server sent none that can be read
	ParentID  string    // the persisted event before this one, "" for the first
	AgentID   string    // the sub-agent it belongs to, "" for the main agent
	Ephemeral bool      // sent once and not stored: not part of [Session.History]
	Data      json.RawMessage
}

// newEvent makes an event of its raw members. types remembers the types of a stream, so that they are not allocated again.
func newEvent(f *eventFields, types eventTypes) Event {
	e := Event{
		ID:        unquote(f.id),
		Type:      types.get(f.typ),
		ParentID:  unquote(f.parentID),
		AgentID:   unquote(f.agentID),
		Ephemeral: string(f.ephemeral) == "true",
		Data:      f.data,
	}
	if n := len(f.timestamp); n > 2 && f.timestamp[0] == '"' {
		_ = e.Timestamp.UnmarshalText(f.timestamp[1 : n-1]) // leaves the zero time when it cannot be read
	}
	return e
}

// eventTypes holds one copy of each type that was seen. A nil one holds none.
type eventTypes map[string]EventType

const maxEventTypes = 1024 // a server has some two hundred

func (types eventTypes) get(raw []byte) EventType {
	if len(raw) > 2 && raw[0] == '"' {
		if t, ok := types[string(raw[1:len(raw)-1])]; ok {
			return t
		}
	}
	t := EventType(unquote(raw))
	if types != nil && len(types) < maxEventTypes && len(t) == len(raw)-2 { // spelled without escapes
		types[string(t)] = t
	}
	return t
}

// UnmarshalJSON reads an event in its wire form. Members of unexpected types are left zero; Data keeps what was sent.
func (e *Event) UnmarshalJSON(b []byte) error {
	var f eventFields
	owned := append([]byte(nil), b...) // b belongs to the decoder
	s := scanner{b: owned}
	if s.peek() != '{' {
		return fmt.Errorf("copilot: event is not an object: %q", quoted(b))
	}
	if _, ok := f.parse(&s); !ok {
		return fmt.Errorf("copilot: event is not valid JSON: %q", quoted(b))
	}
	*e = newEvent(&f, nil)
	return nil
}

// MarshalJSON writes the event in its wire form, so that it can be stored and read back.
func (e Event) MarshalJSON() ([]byte, error) {
	w := struct {
		Type      EventType       `json:"type"`
		Data      json.RawMessage `json:"data,omitempty"`
		ID        string          `json:"id"`
		Timestamp *time.Time      `json:"timestamp,omitempty"`
		ParentID  *string         `json:"parentId"`
		AgentID   string          `json:"agentId,omitempty"`
		Ephemeral bool            `json:"ephemeral,omitempty"`
	}{e.Type, e.Data, e.ID, nil, nil, e.AgentID, e.Ephemeral}
	if !e.Timestamp.IsZero() {
		w.Timestamp = &e.Timestamp
	}
	if e.ParentID != "" {
		w.ParentID = &e.ParentID
	}
	return marshal(w)
}

// LagError reports, at the place of the gap, how many events a subscriber has missed because it fell more than a ring behind. The
// subscription goes on after it with the oldest event still held.
type LagError struct{ Skipped uint64 }

// Error tells how many events were skipped.
func (e *LagError) Error() string {
	return fmt.Sprintf("copilot: %d events skipped by a slow subscriber", e.Skipped)
}

// ring holds the last events of one stream for all its subscribers. Publishing costs the same for any number of them; only
// subscribers that wait are woken.
type ring[T any] struct {
	mu      sync.Mutex
	slots   []slot[T] // a power of two or max long, grown on demand; slot of event n is n % len
	first   uint64    // number of the oldest event held
	next    uint64    // number the next event gets; first == next means empty
	max     int
	subs    int
	waiting []*Subscription[T] // asked to be woken by the next event or the end
	ended   bool
	err     error // why it ended; nil is a clean end
}

type slot[T any] struct {
	value  T
	unread int // subscribers that have not read it yet
}

const firstSlots = 8

func newRing[T any](max int) *ring[T] { return &ring[T]{max: max} }

// publish adds an event and returns its number. It is kept only while somebody has yet to read it.
func (r *ring[T]) publish(v T) uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := r.next
	if r.ended {
		return n
	}
	r.next++
	if r.subs == 0 {
		r.first = r.next
		return n
	}
	if int(n-r.first) == len(r.slots) {
		if len(r.slots) < r.max {
			r.grow()
		} else {
			r.first++ // the oldest makes room; who has not read it is told by its cursor
		}
	}
	s := &r.slots[n%uint64(len(r.slots))]
	s.value, s.unread = v, r.subs
	r.wakeLocked()
	return n
}

func (r *ring[T]) grow() {
	bigger := make([]slot[T], min(r.max, max(firstSlots, 2*len(r.slots))))
	for n := r.first; n < r.next-1; n++ {
		bigger[n%uint64(len(bigger))] = r.slots[n%uint64(len(r.slots))]
	}
	r.slots = bigger
}

func (r *ring[T]) wakeLocked() {
	for i, s := range r.waiting {
		r.waiting[i] = nil
		s.queued = false
		s.signal()
	}
	r.waiting = r.waiting[:0]
}

// end closes the stream: subscribers read what is held, then get err, or a clean end when it is nil. The first end counts.
func (r *ring[T]) end(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ended {
		return
	}
	r.ended, r.err = true, err
	r.wakeLocked()
}

// position is the number of the next event.
func (r *ring[T]) position() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.next
}

func (r *ring[T]) subscribe() *Subscription[T] {
	s := &Subscription[T]{ring: r, wake: make(chan struct{}, 1)}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.subs++
	s.pos = r.next
	return s
}

// readLocked marks the event at n as read by one subscriber and frees what everybody has read.
func (r *ring[T]) readLocked(n uint64) {
	r.slots[n%uint64(len(r.slots))].unread--
	for r.first < r.next {
		s := &r.slots[r.first%uint64(len(r.slots))]
		if s.unread > 0 {
			return
		}
		*s = slot[T]{}
		r.first++
	}
}

// Subscription is one subscriber's place in a stream. It sees every event that was published after it was made, once and
// in order, or a [LagError] where it was too slow. Its methods may be called from any goroutine, but only one of them may
// consume at a time. A subscription that is no longer wanted should be closed; one that is simply dropped is garbage with its stream.
type Subscription[T any] struct {
	ring   *ring[T]
	wake   chan struct{} // signal of publish, end and Close
	busy   atomic.Bool   // somebody consumes
	pos    uint64        // number of the next event to read; guarded by ring.mu, like the following
	queued bool          // stands in ring.waiting
	closed bool
}

func (s *Subscription[T]) signal() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// Close ends the subscription at once: events that were not read are discarded, and a consumer that waits returns. It may be
// called repeatedly, from anywhere, the consuming loop included.
func (s *Subscription[T]) Close() {
	r := s.ring
	r.mu.Lock()
	defer r.mu.Unlock()
	if s.closed {
		return
	}
	s.closed = true
	r.subs--
	for n := max(s.pos, r.first); n < r.next; n++ {
		if n >= r.first {
			r.readLocked(n)
		}
	}
	if r.subs == 0 {
		r.slots, r.first = nil, r.next
	}
	if s.queued { // a quiet stream would remember everybody who ever waited on it
		i := slices.Index(r.waiting, s)
		r.waiting = slices.Delete(r.waiting, i, i+1)
		s.queued = false
	}
	s.signal()
}

// errConsumer is what the second of two concurrent consumers gets.
var errConsumer = fmt.Errorf("copilot: subscription has a consumer already")

// Next returns the next event, waiting for it as long as ctx lasts. The error is a [*LagError] where events were skipped, after which
// Next goes on; io.EOF after Close and after a clean end of the stream; ctx's error and cause when ctx is done, also when events
// are there, which stay for later; else the reason why the stream ended, again at each call.
func (s *Subscription[T]) Next(ctx context.Context) (T, error) {
	if !s.busy.CompareAndSwap(false, true) {
		var zero T
		return zero, errConsumer
	}
	defer s.busy.Store(false)
	return s.read(ctx)
}

func (s *Subscription[T]) read(ctx context.Context) (v T, err error) { return s.readUntil(ctx, nil) }

// readUntil is read that stops waiting, with io.EOF, when done is closed.
func (s *Subscription[T]) readUntil(ctx context.Context, done <-chan struct{}) (v T, err error) {
	for {
		if ctx.Err() != nil {
			return v, contextError(ctx)
		}
		over := isClosed(done) // before the poll, so that nothing that was published before done is missed
		v, ready, err := s.poll()
		if ready {
			return v, err
		}
		if over {
			return v, io.EOF
		}
		select {
		case <-s.wake:
		case <-ctx.Done():
		case <-done:
		}
	}
}

// seek discards the events before number n.
func (s *Subscription[T]) seek(n uint64) {
	r := s.ring
	r.mu.Lock()
	defer r.mu.Unlock()
	for ; s.pos < min(n, r.next); s.pos++ {
		if s.pos >= r.first {
			r.readLocked(s.pos)
		}
	}
}

// poll returns what can be had without waiting. When that is nothing, it has asked for a signal.
func (s *Subscription[T]) poll() (v T, ready bool, err error) {
	r := s.ring
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case s.closed:
		return v, true, io.EOF
	case s.pos < r.first:
		skipped := r.first - s.pos
		s.pos = r.first
		return v, true, &LagError{Skipped: skipped}
	case s.pos < r.next:
		v = r.slots[s.pos%uint64(len(r.slots))].value
		r.readLocked(s.pos)
		s.pos++
		return v, true, nil
	case r.ended && r.err == nil:
		return v, true, io.EOF
	case r.ended:
		return v, true, r.err
	}
	if !s.queued {
		s.queued = true
		r.waiting = append(r.waiting, s)
	}
	return v, false, nil
}

// All returns a sequence over the events that were not read yet. Each pair is an event and nil; or a zero event and a [*LagError],
// after which the sequence goes on; or a zero event and, as the last pair, ctx's error or the reason why the stream ended. A clean
// end and Close yield no error. After a break the sequence may be ranged again and goes on with the next unread event. A
// second concurrent range gets one error pair.
func (s *Subscription[T]) All(ctx context.Context) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		if !s.busy.CompareAndSwap(false, true) {
			var zero T
			yield(zero, errConsumer)
			return
		}
		defer s.busy.Store(false)
		for {
			v, err := s.read(ctx)
			if err == io.EOF {
				return
			}
			if !yield(v, err) {
				return
			}
			if err != nil {
				if _, lag := err.(*LagError); !lag {
					return
				}
			}
		}
	}
}

// once returns a sequence that ends its subscription when the loop ends or ctx is done, so that one which nobody ranges is
// freed with its context. A second range gets an error that matches ErrClosed.
func (s *Subscription[T]) once(ctx context.Context) iter.Seq2[T, error] {
	stop := context.AfterFunc(ctx, s.Close) // a goroutine of the context package, only when ctx ends
	var used atomic.Bool
	return func(yield func(T, error) bool) {
		if used.Swap(true) {
			var zero T
			yield(zero, fmt.Errorf("%w: this sequence can be ranged once", ErrClosed))
			return
		}
		defer s.Close()
		defer stop()
		s.All(ctx)(yield)
	}
}

// EventType names a kind of event. The set is open: events of unknown types are delivered like the others.
type EventType string

// The event types of the runtime's schema, in its order. Those with a payload type below carry its name.
const (
	EventSessionStart                       EventType = "session.start"
	EventSessionResume                      EventType = "session.resume"
	EventSessionRemoteSteerableChanged      EventType = "session.remote_steerable_changed"
	EventSessionError                       EventType = "session.error"
	EventSessionIdle                        EventType = "session.idle"
	EventSessionTitleChanged                EventType = "session.title_changed"
	EventSessionScheduleCreated             EventType = "session.schedule_created"
	EventSessionScheduleCancelled           EventType = "session.schedule_cancelled"
	EventSessionScheduleRearmed             EventType = "session.schedule_rearmed"
	EventSessionAutopilotObjectiveChanged   EventType = "session.autopilot_objective_changed"
	EventSessionInfo                        EventType = "session.info"
	EventSessionIndexedSearch               EventType = "session.indexed_search"
	EventSessionWarning                     EventType = "session.warning"
	EventSessionModelChange                 EventType = "session.model_change"
	EventSessionModelDeselected             EventType = "session.model_deselected"
	EventSessionAutoTierSwitchFailed        EventType = "session.auto_tier_switch_failed"
	EventSessionModeChanged                 EventType = "session.mode_changed"
	EventSessionModeNoticeDelivered         EventType = "session.mode_notice_delivered"
	EventSessionSessionLimitsChanged        EventType = "session.session_limits_changed"
	EventSessionPlanChanged                 EventType = "session.plan_changed"
	EventSessionTodosChanged                EventType = "session.todos_changed"
	EventSessionWorkspaceFileChanged        EventType = "session.workspace_file_changed"
	EventSessionHandoff                     EventType = "session.handoff"
	EventSessionTruncation                  EventType = "session.truncation"
	EventSessionSnapshotRewind              EventType = "session.snapshot_rewind"
	EventSessionShutdown                    EventType = "session.shutdown"
	EventSessionUsageCheckpoint             EventType = "session.usage_checkpoint"
	EventSessionContextChanged              EventType = "session.context_changed"
	EventSessionUsageInfo                   EventType = "session.usage_info"
	EventSessionContextCleared              EventType = "session.context_cleared"
	EventSessionCompactionStart             EventType = "session.compaction_start"
	EventSessionCompactionComplete          EventType = "session.compaction_complete"
	EventSessionTaskComplete                EventType = "session.task_complete"
	EventSessionPermissionRecovery          EventType = "session.permission_recovery"
	EventUserMessage                        EventType = "user.message"
	EventPendingMessagesModified            EventType = "pending_messages.modified"
	EventAssistantTurnStart                 EventType = "assistant.turn_start"
	EventAssistantIntent                    EventType = "assistant.intent"
	EventAssistantServerToolProgress        EventType = "assistant.server_tool_progress"
	EventAssistantReasoning                 EventType = "assistant.reasoning"
	EventAssistantReasoningDelta            EventType = "assistant.reasoning_delta"
	EventAssistantToolCallDelta             EventType = "assistant.tool_call_delta"
	EventAssistantStreamingDelta            EventType = "assistant.streaming_delta"
	EventAssistantMessage                   EventType = "assistant.message"
	EventAssistantMessageStart              EventType = "assistant.message_start"
	EventAssistantMessageDelta              EventType = "assistant.message_delta"
	EventAssistantTurnEnd                   EventType = "assistant.turn_end"
	EventAssistantIdle                      EventType = "assistant.idle"
	EventAssistantUsage                     EventType = "assistant.usage"
	EventModelCallFailure                   EventType = "model.call_failure"
	EventModelCallFinished                  EventType = "model.call_finished"
	EventAbort                              EventType = "abort"
	EventToolUserRequested                  EventType = "tool.user_requested"
	EventToolExecutionStart                 EventType = "tool.execution_start"
	EventToolExecutionPartialResult         EventType = "tool.execution_partial_result"
	EventToolExecutionProgress              EventType = "tool.execution_progress"
	EventToolExecutionComplete              EventType = "tool.execution_complete"
	EventToolSearchActivated                EventType = "tool_search.activated"
	EventSkillInvoked                       EventType = "skill.invoked"
	EventSubagentStarted                    EventType = "subagent.started"
	EventSubagentConfigured                 EventType = "subagent.configured"
	EventSubagentCompleted                  EventType = "subagent.completed"
	EventSubagentFailed                     EventType = "subagent.failed"
	EventSubagentSelected                   EventType = "subagent.selected"
	EventSubagentDeselected                 EventType = "subagent.deselected"
	EventHookStart                          EventType = "hook.start"
	EventHookEnd                            EventType = "hook.end"
	EventHookProgress                       EventType = "hook.progress"
	EventSystemMessage                      EventType = "system.message"
	EventSystemNotification                 EventType = "system.notification"
	EventPermissionRequested                EventType = "permission.requested"
	EventPermissionCompleted                EventType = "permission.completed"
	EventUserInputRequested                 EventType = "user_input.requested"
	EventUserInputCompleted                 EventType = "user_input.completed"
	EventElicitationRequested               EventType = "elicitation.requested"
	EventElicitationCompleted               EventType = "elicitation.completed"
	EventSamplingRequested                  EventType = "sampling.requested"
	EventSamplingCompleted                  EventType = "sampling.completed"
	EventMCPOAuthRequired                   EventType = "mcp.oauth_required"
	EventMCPOAuthCompleted                  EventType = "mcp.oauth_completed"
	EventMCPHeadersRefreshRequired          EventType = "mcp.headers_refresh_required"
	EventMCPHeadersRefreshCompleted         EventType = "mcp.headers_refresh_completed"
	EventSessionCustomNotification          EventType = "session.custom_notification"
	EventExternalToolRequested              EventType = "external_tool.requested"
	EventExternalToolCompleted              EventType = "external_tool.completed"
	EventCommandQueued                      EventType = "command.queued"
	EventCommandExecute                     EventType = "command.execute"
	EventCommandCompleted                   EventType = "command.completed"
	EventAutoModeSwitchRequested            EventType = "auto_mode_switch.requested"
	EventAutoModeSwitchCompleted            EventType = "auto_mode_switch.completed"
	EventSessionLimitsExhaustedRequested    EventType = "session_limits_exhausted.requested"
	EventSessionLimitsExhaustedCompleted    EventType = "session_limits_exhausted.completed"
	EventCommandsChanged                    EventType = "commands.changed"
	EventCapabilitiesChanged                EventType = "capabilities.changed"
	EventExitPlanModeRequested              EventType = "exit_plan_mode.requested"
	EventExitPlanModeCompleted              EventType = "exit_plan_mode.completed"
	EventSessionToolsUpdated                EventType = "session.tools_updated"
	EventSessionBackgroundTasksChanged      EventType = "session.background_tasks_changed"
	EventSessionSkillsLoaded                EventType = "session.skills_loaded"
	EventSessionCustomAgentsUpdated         EventType = "session.custom_agents_updated"
	EventSessionMCPServersLoaded            EventType = "session.mcp_servers_loaded"
	EventSessionMCPServerStatusChanged      EventType = "session.mcp_server_status_changed"
	EventSessionMCPServerRemoved            EventType = "session.mcp_server_removed"
	EventSessionMCPServerNeedsReconnect     EventType = "session.mcp_server_needs_reconnect"
	EventMCPToolsListChanged                EventType = "mcp.tools.list_changed"
	EventMCPResourcesListChanged            EventType = "mcp.resources.list_changed"
	EventMCPPromptsListChanged              EventType = "mcp.prompts.list_changed"
	EventSessionExtensionsLoaded            EventType = "session.extensions_loaded"
	EventSessionExtensionsAttachmentsPushed EventType = "session.extensions.attachments_pushed"
	EventMCPAppToolCallComplete             EventType = "mcp_app.tool_call_complete"
)

// Event types that the schema marks experimental.
//
// Experimental: they may change or go with any release of the runtime.
const (
	EventSessionAutoTierRecommendation          EventType = "session.auto_tier_recommendation"
	EventSessionPermissionsChanged              EventType = "session.permissions_changed"
	EventSessionCompletionReceipt               EventType = "session.completion_receipt"
	EventSessionFusionRouteStarted              EventType = "session.fusion_route_started"
	EventSessionFusionRouteFailed               EventType = "session.fusion_route_failed"
	EventSessionFusionResolved                  EventType = "session.fusion_resolved"
	EventSessionFusionCompleted                 EventType = "session.fusion_completed"
	EventAssistantFusionPhaseStarted            EventType = "assistant.fusion_phase_started"
	EventAssistantFusionPhaseActivity           EventType = "assistant.fusion_phase_activity"
	EventAssistantFusionPhaseCompleted          EventType = "assistant.fusion_phase_completed"
	EventAssistantFusionPhaseFailed             EventType = "assistant.fusion_phase_failed"
	EventSessionBinaryAsset                     EventType = "session.binary_asset"
	EventPermissionCarriedForward               EventType = "permission.carriedForward"
	EventPermissionMessageAuthorization         EventType = "permission.messageAuthorization"
	EventPermissionMessageAuthorizationRead     EventType = "permission.messageAuthorizationRead"
	EventPermissionMessageAuthorizationDegraded EventType = "permission.messageAuthorizationDegraded"
	EventPermissionAssentDetected               EventType = "permission.assentDetected"
	EventPermissionContextualAuthorization      EventType = "permission.contextualAuthorization"
	EventUIEphemeralQuery                       EventType = "ui.ephemeral_query"
	EventSessionAutoModeResolved                EventType = "session.auto_mode_resolved"
	EventSessionManagedSettingsResolved         EventType = "session.managed_settings_resolved"
	EventSessionManagedSettingsEnforced         EventType = "session.managed_settings_enforced"
	EventWorkflowRunUpdated                     EventType = "workflow.run_updated"
	EventWorkflowRunStarted                     EventType = "workflow.run_started"
	EventWorkflowRunSettled                     EventType = "workflow.run_settled"
	EventSessionCanvasOpened                    EventType = "session.canvas.opened"
	EventSessionCanvasRegistryChanged           EventType = "session.canvas.registry_changed"
	EventSessionCanvasClosed                    EventType = "session.canvas.closed"
	EventSessionCanvasUnavailable               EventType = "session.canvas.unavailable"
	EventSessionCanvasRecorded                  EventType = "session.canvas.recorded"
	EventSessionCanvasRemoved                   EventType = "session.canvas.removed"
)

// Event types that the schema marks internal: the runtime sends them to itself, and clients see them pass.
//
// Experimental: they may change or go with any release of the runtime.
const (
	EventSessionMemoryChanged          EventType = "session.memory_changed"
	EventSessionFusionChangeCheckpoint EventType = "session.fusion_change_checkpoint"
	EventSessionFusionHandoff          EventType = "session.fusion_handoff"
	EventSessionFusionCommitStarted    EventType = "session.fusion_commit_started"
	EventAssistantTurnRetry            EventType = "assistant.turn_retry"
	EventAgentInterrupted              EventType = "agent.interrupted"
	EventPromptCacheBreak              EventType = "prompt_cache_break"
	EventModelCallStart                EventType = "model.call_start"
	EventSkillInvokedRef               EventType = "skill.invoked_ref"
	EventSkillContextDelivered         EventType = "skill.context_delivered"
	EventSkillContextDeliveredRef      EventType = "skill.context_delivered_ref"
	EventSandboxDecision               EventType = "sandbox.decision"
)

// Event types that CLI 1.0.102 sends and its schema does not list.
//
// Experimental: they may change or go with any release of the runtime.
const (
	EventModelTurnStarted            EventType = "model.turn_started"
	EventModelTurnEnded              EventType = "model.turn_ended"
	EventModelTurnFailed             EventType = "model.turn_failed"
	EventModelTurnRetry              EventType = "model.turn_retry"
	EventModelLog                    EventType = "model.log"
	EventModelModelCallStarted       EventType = "model.model_call_started"
	EventModelModelCallSuccess       EventType = "model.model_call_success"
	EventModelModelCallFailure       EventType = "model.model_call_failure"
	EventModelMessage                EventType = "model.message"
	EventModelResponse               EventType = "model.response"
	EventModelCallFinalResult        EventType = "model.call_final_result"
	EventModelMessagesSnapshot       EventType = "model.messages_snapshot"
	EventModelToolExecution          EventType = "model.tool_execution"
	EventModelTelemetry              EventType = "model.telemetry"
	EventModelCompactionStarted      EventType = "model.compaction_started"
	EventModelCompactionCompleted    EventType = "model.compaction_completed"
	EventToolShellOutput             EventType = "tool.shell_output"
	EventSessionAutopilotStopped     EventType = "session.autopilot_stopped"
	EventSessionMCPServerToolsLoaded EventType = "session.mcp_server_tools_loaded"
)

// Payload is the typed data of an event: a pointer to one of the payload types of this package, or *RawPayload.
// Only this package implements it; use a type switch.
//
// Payload types follow the wire: fields stand in its order, a pointer, or omitempty in the tag, marks what may be absent,
// and null counts as absent. Enumerations are open; a comment that lists values lists the known ones. A json.RawMessage
// holds what is opaque or seldom read, as received. Members that a payload type lacks can be read with [Event.Decode].
type Payload interface{ payload() }

// RawPayload is the payload of an event that has no payload type, or whose data does not fit it.
type RawPayload struct {
	Type EventType
	Data json.RawMessage // shared with the event; do not change it
	Err  error           // nil: no payload type for Type; else a *DecodeError
}

// Payload decodes the event's data anew on each call. It never returns nil: what has no payload type, or does not fit it,
// comes as *RawPayload. Absent and null data count as an empty object.
func (e Event) Payload() Payload {
	p := newPayload(e.Type)
	if p == nil {
		return &RawPayload{Type: e.Type, Data: e.Data}
	}
	if err := e.Decode(p); err != nil {
		return &RawPayload{Type: e.Type, Data: e.Data, Err: err}
	}
	return p
}

// Decode decodes the event's data into v, a pointer as for [json.Unmarshal]. Absent and null data count as an empty
// object. The error is a *DecodeError.
func (e Event) Decode(v any) error {
	data := e.Data
	if len(data) == 0 || string(data) == "null" {
		data = json.RawMessage("{}")
	}
	if err := json.Unmarshal(data, v); err != nil {
		return &DecodeError{Type: e.Type, Err: err}
	}
	return nil
}

// DecodeError says that an event's data does not fit the type it was decoded into.
type DecodeError struct {
	Type EventType
	Err  error // from encoding/json
}

// Error names the event type and the misfit, each cut short: a peer chose their length.
func (e *DecodeError) Error() string {
	return fmt.Sprintf("copilot: event %.60q: %v", e.Type, clipped{e.Err})
}

// Unwrap returns the error of encoding/json.
func (e *DecodeError) Unwrap() error { return e.Err }

// AgentMode is how far an agent goes by itself.
type AgentMode string

// The agent modes. Shell marks a message that is a shell command of the user's; a session is never in it.
const (
	AgentModeInteractive AgentMode = "interactive"
	AgentModePlan        AgentMode = "plan"
	AgentModeAutopilot   AgentMode = "autopilot"
	AgentModeShell       AgentMode = "shell"
)

// SessionStart opens the log of a new session.
type SessionStart struct {
	SessionID           string                   `json:"sessionId"`
	Version             int                      `json:"version"` // of the event format
	Producer            string                   `json:"producer"`
	CopilotVersion      string                   `json:"copilotVersion"`
	StartTime           time.Time                `json:"startTime"`
	SelectedModel       string                   `json:"selectedModel,omitempty"`
	ReasoningEffort     string                   `json:"reasoningEffort,omitempty"`
	ReasoningSummary    string                   `json:"reasoningSummary,omitempty"` // none, concise, detailed
	Verbosity           string                   `json:"verbosity,omitempty"`        // low, medium, high
	ContextTier         string                   `json:"contextTier,omitempty"`      // default, long_context; "" for none
	AutoTier            string                   `json:"autoTier,omitempty"`         // efficiency, balance, intelligence, fast
	SessionLimits       *SessionLimits           `json:"sessionLimits,omitempty"`
	Context             *WorkingDirectoryContext `json:"context,omitempty"`
	GitHubMCPToolConfig *GitHubMCPToolConfig     `json:"githubMcpToolConfig,omitempty"`
	AlreadyInUse        bool                     `json:"alreadyInUse,omitempty"` // another process holds the session
	RemoteSteerable     bool                     `json:"remoteSteerable,omitempty"`
	// DetachedFromSpawningParentSessionID is the session that started this one as a detached helper.
	DetachedFromSpawningParentSessionID string `json:"detachedFromSpawningParentSessionId,omitempty"`
}

// WorkingDirectoryContext is a working directory with what git says of it.
type WorkingDirectoryContext struct {
	CWD               string `json:"cwd"`
	GitRoot           string `json:"gitRoot,omitempty"`
	Repository        string `json:"repository,omitempty"` // owner/name
	HostType          string `json:"hostType,omitempty"`   // github, ado
	RepositoryHost    string `json:"repositoryHost,omitempty"`
	Branch            string `json:"branch,omitempty"`
	HeadCommit        string `json:"headCommit,omitempty"`
	BaseCommit        string `json:"baseCommit,omitempty"`
	PendingGitContext bool   `json:"pendingGitContext,omitempty"` // the rest follows in a SessionContextChanged
}

// SessionResume says that a client, not always this one, resumed the session.
type SessionResume struct {
	ResumeTime          time.Time                `json:"resumeTime"`
	EventCount          int64                    `json:"eventCount"` // stored by then
	EventsFileSizeBytes int64                    `json:"eventsFileSizeBytes,omitempty"`
	SelectedModel       string                   `json:"selectedModel,omitempty"`
	ReasoningEffort     string                   `json:"reasoningEffort,omitempty"`
	ReasoningSummary    string                   `json:"reasoningSummary,omitempty"`
	Verbosity           string                   `json:"verbosity,omitempty"`
	ContextTier         string                   `json:"contextTier,omitempty"`
	AutoTier            string                   `json:"autoTier,omitempty"`
	SessionLimits       *SessionLimits           `json:"sessionLimits,omitempty"`
	Context             *WorkingDirectoryContext `json:"context,omitempty"`
	AlreadyInUse        bool                     `json:"alreadyInUse,omitempty"`
	SessionWasActive    bool                     `json:"sessionWasActive,omitempty"` // the resume joined running work
	RemoteSteerable     bool                     `json:"remoteSteerable,omitempty"`
	ContinuePendingWork bool                     `json:"continuePendingWork,omitempty"` // open tool calls and permissions stayed open
}

// SessionIdle says that the session has nothing left to do: the queue is empty, agents and attached shells have ended.
type SessionIdle struct {
	Aborted bool      `json:"aborted,omitempty"`
	Mode    AgentMode `json:"mode,omitempty"`
}

// AssistantIdle says that the main agent's loop has stopped; background work may go on.
type AssistantIdle struct {
	Aborted bool `json:"aborted,omitempty"`
}

// SessionErrorEvent is the payload of session.error, a failure to show to the user. (SessionError is an error type.)
type SessionErrorEvent struct {
	ErrorType             string `json:"errorType"`                       // authentication, authorization, quota, rate_limit, context_limit, query, ...
	ErrorCode             string `json:"errorCode,omitempty"`             // the provider's
	EligibleForAutoSwitch bool   `json:"eligibleForAutoSwitch,omitempty"` // not final: a switch to the Auto model follows, or is asked for
	Message               string `json:"message"`
	Remediation           string `json:"remediation,omitempty"` // sign_in, switch_account, show_account, review_sandbox_policy, allow_sandbox_outbound
	Stack                 string `json:"stack,omitempty"`
	StatusCode            int    `json:"statusCode,omitempty"`       // upstream HTTP status
	ProviderCallID        string `json:"providerCallId,omitempty"`   // GitHub's request id
	ServiceRequestID      string `json:"serviceRequestId,omitempty"` // Copilot's request id
	URL                   string `json:"url,omitempty"`
	OriginatingMessageID  string `json:"originatingMessageId,omitempty"` // the message whose run failed; "" for what Log wrote
}

// SessionInfoEvent is the payload of session.info, a line for the timeline. (SessionInfo describes a stored session.)
type SessionInfoEvent struct {
	InfoType string `json:"infoType"` // notification, timing, context_window, mcp, snapshot, configuration, authentication, model, ...
	Message  string `json:"message"`
	URL      string `json:"url,omitempty"`
	Tip      string `json:"tip,omitempty"`
}

// SessionWarning is a warning for the timeline.
type SessionWarning struct {
	WarningType string `json:"warningType"` // subscription, policy, mcp, notification, ...
	Message     string `json:"message"`
	URL         string `json:"url,omitempty"`
	Remediation string `json:"remediation,omitempty"` // as in SessionErrorEvent
}

// SessionTitleChanged carries the session's new title.
type SessionTitleChanged struct {
	Title string `json:"title"`
}

// SessionModelChange says that the model or one of its settings changed.
type SessionModelChange struct {
	PreviousModel            string `json:"previousModel,omitempty"`
	NewModel                 string `json:"newModel"`
	PreviousReasoningEffort  string `json:"previousReasoningEffort,omitempty"`
	ReasoningEffort          string `json:"reasoningEffort,omitempty"`
	PreviousReasoningSummary string `json:"previousReasoningSummary,omitempty"`
	ReasoningSummary         string `json:"reasoningSummary,omitempty"`
	PreviousVerbosity        string `json:"previousVerbosity,omitempty"`
	Verbosity                string `json:"verbosity,omitempty"`
	ContextTier              string `json:"contextTier,omitempty"`
	Cause                    string `json:"cause,omitempty"`  // free text
	Source                   string `json:"source,omitempty"` // sdk, agent, model_picker, automatic, ...
	PreviousAutoTier         string `json:"previousAutoTier,omitempty"`
	AutoTier                 string `json:"autoTier,omitempty"`
}

// SessionModeChanged says that the agent mode changed.
type SessionModeChanged struct {
	PreviousMode AgentMode `json:"previousMode"`
	NewMode      AgentMode `json:"newMode"`
}

// SessionUsageInfo says how full the context window is.
type SessionUsageInfo struct {
	TokenLimit            int64 `json:"tokenLimit"`
	CurrentTokens         int64 `json:"currentTokens"`
	MessagesLength        int64 `json:"messagesLength"` // messages in the window
	SystemTokens          int64 `json:"systemTokens,omitempty"`
	ConversationTokens    int64 `json:"conversationTokens,omitempty"`
	ToolDefinitionsTokens int64 `json:"toolDefinitionsTokens,omitempty"`
	IsInitial             bool  `json:"isInitial,omitempty"` // the session's first
}

// SessionCompactionStart says that the history is about to be summarized.
type SessionCompactionStart struct {
	Model                 string `json:"model,omitempty"`
	SystemTokens          int64  `json:"systemTokens,omitempty"`
	ConversationTokens    int64  `json:"conversationTokens,omitempty"`
	ToolDefinitionsTokens int64  `json:"toolDefinitionsTokens,omitempty"`
	CurrentTokens         int64  `json:"currentTokens,omitempty"`
	TokenLimit            int64  `json:"tokenLimit,omitempty"`
	Trigger               string `json:"trigger,omitempty"` // threshold, context_limit_retry, manual, memory_pressure, model_switch
	CompactionAttemptID   string `json:"compactionAttemptId,omitempty"`
}

// SessionCompactionComplete is the outcome of a compaction.
type SessionCompactionComplete struct {
	Success                     bool                `json:"success"`
	Error                       string              `json:"error,omitempty"`
	PreCompactionTokens         int64               `json:"preCompactionTokens,omitempty"`
	PostCompactionTokens        int64               `json:"postCompactionTokens,omitempty"`
	PreCompactionMessagesLength int64               `json:"preCompactionMessagesLength,omitempty"`
	MessagesRemoved             int64               `json:"messagesRemoved,omitempty"`
	TokensRemoved               int64               `json:"tokensRemoved,omitempty"`
	CustomInstructions          string              `json:"customInstructions,omitempty"`
	SummaryContent              string              `json:"summaryContent,omitempty"`
	ResponsesReasoning          *ResponsesReasoning `json:"responsesReasoning,omitempty"`
	BehaviorModelID             string              `json:"behaviorModelId,omitempty"`
	CheckpointNumber            int                 `json:"checkpointNumber,omitempty"`
	CheckpointPath              string              `json:"checkpointPath,omitempty"`
	CompactionTokensUsed        *CompactionTokens   `json:"compactionTokensUsed,omitempty"`
	RequestID                   string              `json:"requestId,omitempty"`
	ServiceRequestID            string              `json:"serviceRequestId,omitempty"`
	SystemTokens                int64               `json:"systemTokens,omitempty"`
	ConversationTokens          int64               `json:"conversationTokens,omitempty"`
	ToolDefinitionsTokens       int64               `json:"toolDefinitionsTokens,omitempty"`
	StatusCode                  int                 `json:"statusCode,omitempty"` // HTTP status of a failed call
	TokenLimit                  int64               `json:"tokenLimit,omitempty"`
	Trigger                     string              `json:"trigger,omitempty"` // as in SessionCompactionStart
	Outcome                     string              `json:"outcome,omitempty"` // applied, ...
	CompactionAttemptID         string              `json:"compactionAttemptId,omitempty"`
}

// ResponsesReasoning is the reasoning effort a model of the Responses API was asked for.
type ResponsesReasoning struct {
	Model         string `json:"model"`
	InitialEffort string `json:"initialEffort"`
	Effort        string `json:"effort"`
}

// CompactionTokens is what the model call of a compaction used.
type CompactionTokens struct {
	InputTokens      int64         `json:"inputTokens,omitempty"`
	OutputTokens     int64         `json:"outputTokens,omitempty"`
	CacheReadTokens  int64         `json:"cacheReadTokens,omitempty"`
	CacheWriteTokens int64         `json:"cacheWriteTokens,omitempty"`
	CopilotUsage     *CopilotUsage `json:"copilotUsage,omitempty"`
	Duration         int64         `json:"duration,omitempty"` // ms
	Model            string        `json:"model,omitempty"`
}

// CopilotUsage is what Copilot bills for a model call, in billionths of an AI unit.
type CopilotUsage struct {
	Model        string        `json:"model,omitempty"`
	TokenDetails []TokenDetail `json:"tokenDetails,omitempty"`
	TotalNanoAIU float64       `json:"totalNanoAiu"`
}

// TokenDetail is the price and number of one kind of token.
type TokenDetail struct {
	BatchSize    int64  `json:"batchSize"`
	CostPerBatch int64  `json:"costPerBatch"`
	Model        string `json:"model,omitempty"`
	TokenCount   int64  `json:"tokenCount"`
	TokenType    string `json:"tokenType"`
}

// SessionTaskComplete says that the agent declared its task done, or blocked.
type SessionTaskComplete struct {
	Summary     string             `json:"summary,omitempty"`
	Success     *bool              `json:"success,omitempty"` // false: given up
	Outcome     string             `json:"outcome,omitempty"` // completed, continue, blocked
	Reason      string             `json:"reason,omitempty"`
	ObjectiveID *int64             `json:"objectiveId,omitempty"`
	Blocker     *PermissionBlocker `json:"blocker,omitempty"`
}

// PermissionBlocker says which permission holds a task up.
type PermissionBlocker struct {
	Kind               string          `json:"kind"`   // permission_recovery
	Reason             string          `json:"reason"` // permission_required, permission_denied, attempts_exhausted, ...
	Resumable          bool            `json:"resumable"`
	PermissionRecovery json.RawMessage `json:"permissionRecovery"`
}

// SessionSnapshotRewind says that the history was cut back.
type SessionSnapshotRewind struct {
	UpToEventID   string   `json:"upToEventId"` // the first one removed
	EventsRemoved int64    `json:"eventsRemoved"`
	EventIDs      []string `json:"eventIds,omitempty"`
}

// SessionShutdown is the last event of a session's time in memory, with its totals. The session can be resumed.
type SessionShutdown struct {
	ShutdownType          string                 `json:"shutdownType"` // routine, error
	ErrorReason           string                 `json:"errorReason,omitempty"`
	TotalPremiumRequests  float64                `json:"totalPremiumRequests,omitempty"`
	TotalNanoAIU          float64                `json:"totalNanoAiu,omitempty"`
	TokenDetails          map[string]TokenCount  `json:"tokenDetails,omitempty"` // by token type
	TotalAPIDurationMs    int64                  `json:"totalApiDurationMs"`
	SessionStartTime      int64                  `json:"sessionStartTime"` // Unix ms
	EventsFileSizeBytes   int64                  `json:"eventsFileSizeBytes,omitempty"`
	CodeChanges           CodeChanges            `json:"codeChanges"`
	ModelMetrics          map[string]ModelMetric `json:"modelMetrics"`           // by model id
	AgentMetrics          map[string]AgentMetric `json:"agentMetrics,omitempty"` // by agent id; the main agent is "main"
	CurrentModel          string                 `json:"currentModel,omitempty"`
	CurrentTokens         int64                  `json:"currentTokens,omitempty"`
	SystemTokens          int64                  `json:"systemTokens,omitempty"`
	ConversationTokens    int64                  `json:"conversationTokens,omitempty"`
	ToolDefinitionsTokens int64                  `json:"toolDefinitionsTokens,omitempty"`
}

// TokenCount is a number of tokens of one type.
type TokenCount struct {
	TokenCount int64 `json:"tokenCount"`
}

// CodeChanges sums up the edits of a session.
type CodeChanges struct {
	LinesAdded    int64    `json:"linesAdded"`
	LinesRemoved  int64    `json:"linesRemoved"`
	FilesModified []string `json:"filesModified"`
}

// ModelMetric sums up the calls to one model.
type ModelMetric struct {
	Requests     ModelRequests         `json:"requests"`
	Usage        ModelUsage            `json:"usage"`
	TotalNanoAIU float64               `json:"totalNanoAiu,omitempty"`
	TokenDetails map[string]TokenCount `json:"tokenDetails,omitempty"` // by token type
}

// ModelRequests counts calls to a model.
type ModelRequests struct {
	Count int64   `json:"count,omitempty"`
	Cost  float64 `json:"cost,omitempty"` // premium requests
}

// ModelUsage counts a model's tokens.
type ModelUsage struct {
	InputTokens      int64 `json:"inputTokens"`
	OutputTokens     int64 `json:"outputTokens"`
	CacheReadTokens  int64 `json:"cacheReadTokens"`
	CacheWriteTokens int64 `json:"cacheWriteTokens"`
	ReasoningTokens  int64 `json:"reasoningTokens,omitempty"`
}

// AgentMetric sums up the model calls of one agent.
type AgentMetric struct {
	AgentName          string                 `json:"agentName,omitempty"`
	AgentDisplayName   string                 `json:"agentDisplayName,omitempty"`
	TotalAPIDurationMs int64                  `json:"totalApiDurationMs"`
	TotalNanoAIU       float64                `json:"totalNanoAiu"`
	ModelMetrics       map[string]ModelMetric `json:"modelMetrics"` // by model id
}

// SessionContextChanged says that the working directory, or what git says of it, changed.
type SessionContextChanged struct {
	WorkingDirectoryContext
}

// SessionPlanChanged says that the session's plan changed; read it anew.
type SessionPlanChanged struct {
	Operation string `json:"operation"` // create, update, delete
}

// SessionWorkspaceFileChanged says that a file of the session's workspace changed.
type SessionWorkspaceFileChanged struct {
	Path      string `json:"path"`      // relative to the workspace's files directory
	Operation string `json:"operation"` // create, update
}

// SessionToolsUpdated says that the set of tools was built anew.
type SessionToolsUpdated struct {
	Model string `json:"model"` // the model it was built for
}

// SessionSkillsLoaded lists the skills of the session.
type SessionSkillsLoaded struct {
	Skills []LoadedSkill `json:"skills"`
}

// LoadedSkill is an entry of SessionSkillsLoaded.
type LoadedSkill struct {
	Name          string `json:"name"`
	CommandName   string `json:"commandName,omitempty"`
	Description   string `json:"description"`
	Source        string `json:"source"` // project, inherited, personal-copilot, personal-agents, plugin, custom, builtin, sdk
	UserInvocable bool   `json:"userInvocable"`
	Enabled       bool   `json:"enabled"`
	Path          string `json:"path,omitempty"`
	ArgumentHint  string `json:"argumentHint,omitempty"`
}

// SessionMCPServersLoaded lists the MCP servers of the session.
type SessionMCPServersLoaded struct {
	Servers []LoadedMCPServer `json:"servers"`
}

// LoadedMCPServer is an entry of SessionMCPServersLoaded.
type LoadedMCPServer struct {
	Name           string          `json:"name"`
	Status         MCPServerStatus `json:"status"`
	Source         string          `json:"source,omitempty"` // user, workspace, plugin, builtin, managed
	DisplayName    string          `json:"displayName,omitempty"`
	Error          string          `json:"error,omitempty"`
	ServerMetadata json.RawMessage `json:"serverMetadata,omitempty"`
	Transport      string          `json:"transport,omitempty"` // stdio, http, sse, memory
	PluginName     string          `json:"pluginName,omitempty"`
	PluginVersion  string          `json:"pluginVersion,omitempty"`
}

// MCPServerStatus is the state of an MCP server.
type MCPServerStatus string

// The states of an MCP server.
const (
	MCPConnected     MCPServerStatus = "connected"
	MCPFailed        MCPServerStatus = "failed"
	MCPNeedsAuth     MCPServerStatus = "needs-auth"
	MCPPending       MCPServerStatus = "pending"
	MCPDisabled      MCPServerStatus = "disabled"
	MCPStopped       MCPServerStatus = "stopped"
	MCPNotConfigured MCPServerStatus = "not_configured"
)

// SessionMCPServerStatusChanged carries the new state of one MCP server.
type SessionMCPServerStatusChanged struct {
	ServerName   string          `json:"serverName"`
	Status       MCPServerStatus `json:"status"`
	Error        string          `json:"error,omitempty"`
	ConfigSource string          `json:"configSource,omitempty"` // as LoadedMCPServer.Source
}

// CapabilitiesChanged carries the capabilities that changed; the others stay.
type CapabilitiesChanged struct {
	UI *UICapabilitiesChange `json:"ui,omitempty"`
}

// UICapabilitiesChange is what changed in a session's user interface; nil means unchanged.
type UICapabilitiesChange struct {
	Elicitation *bool `json:"elicitation,omitempty"`
	MCPApps     *bool `json:"mcpApps,omitempty"`
	Canvases    *bool `json:"canvases,omitempty"`
}

// CommandsChanged lists all commands that clients have registered.
type CommandsChanged struct {
	Commands []CommandInfo `json:"commands"`
}

// CommandInfo is an entry of CommandsChanged.
type CommandInfo struct {
	Name        string `json:"name"`
	Description string `json:"description,omitempty"`
}

// UserMessage says that a message of the user's, or one injected in their place, entered the conversation.
type UserMessage struct {
	Content                          string              `json:"content"` // as shown to the user
	ResponsesReasoning               *ResponsesReasoning `json:"responsesReasoning,omitempty"`
	MessageID                        string              `json:"messageId,omitempty"`          // what Send returned
	TransformedContent               string              `json:"transformedContent,omitempty"` // as given to the model
	Attachments                      []Attachment        `json:"attachments,omitempty"`
	SupportedNativeDocumentMIMETypes []string            `json:"supportedNativeDocumentMimeTypes,omitempty"`
	NativeDocumentPathFallbackPaths  []string            `json:"nativeDocumentPathFallbackPaths,omitempty"` // documents given to the model by path
	Source                           string              `json:"source,omitempty"`                          // "" when the user typed it
	Delivery                         string              `json:"delivery,omitempty"`                        // idle, steering, queued
	AgentMode                        AgentMode           `json:"agentMode,omitempty"`
	IsAutopilotContinuation          bool                `json:"isAutopilotContinuation,omitempty"` // autopilot wrote it
	InteractionID                    string              `json:"interactionId,omitempty"`
	TurnID                           string              `json:"turnId,omitempty"`
	ParentAgentTaskID                string              `json:"parentAgentTaskId,omitempty"`
}

// Attachment goes with a message, to the server and in UserMessage. Type says which of the other fields count.
type Attachment struct {
	Type             AttachmentType  `json:"type"`
	Path             string          `json:"path,omitempty"`             // file, directory, github_file, github_snippet
	FilePath         string          `json:"filePath,omitempty"`         // selection
	DisplayName      string          `json:"displayName,omitempty"`      // file, directory, selection, blob
	LineRange        *LineRange      `json:"lineRange,omitempty"`        // file, github_snippet
	Text             string          `json:"text,omitempty"`             // selection
	Selection        *Selection      `json:"selection,omitempty"`        // selection
	Data             string          `json:"data,omitempty"`             // blob: standard base64
	MIMEType         string          `json:"mimeType,omitempty"`         // file, blob
	AssetID          string          `json:"assetId,omitempty"`          // file, blob: set by the server
	ByteLength       int64           `json:"byteLength,omitempty"`       // file, blob: set by the server
	OmittedReason    string          `json:"omittedReason,omitempty"`    // file, blob: set by the server; too_large, asset_unavailable, unsupported_format
	TaggedFilesEntry string          `json:"taggedFilesEntry,omitempty"` // file, directory: set by the server
	URL              string          `json:"url,omitempty"`              // all of github_*
	Repo             *GitHubRepo     `json:"repo,omitempty"`             // github_*, save reference, file_diff, tree_comparison, url
	Ref              string          `json:"ref,omitempty"`              // github_repository, github_file, github_snippet
	Number           int64           `json:"number,omitempty"`           // github_reference
	Title            string          `json:"title,omitempty"`            // github_reference, extension_context
	ReferenceType    string          `json:"referenceType,omitempty"`    // github_reference: issue, pr, discussion
	State            string          `json:"state,omitempty"`            // github_reference
	OID              string          `json:"oid,omitempty"`              // github_commit
	Message          string          `json:"message,omitempty"`          // github_commit
	TagName          string          `json:"tagName,omitempty"`          // github_release
	Name             string          `json:"name,omitempty"`             // github_release
	JobID            int64           `json:"jobId,omitempty"`            // github_actions_job
	JobName          string          `json:"jobName,omitempty"`          // github_actions_job
	WorkflowName     string          `json:"workflowName,omitempty"`     // github_actions_job
	Conclusion       string          `json:"conclusion,omitempty"`       // github_actions_job
	Description      string          `json:"description,omitempty"`      // github_repository
	Head             *GitHubRevision `json:"head,omitempty"`             // github_file_diff, github_tree_comparison
	Base             *GitHubRevision `json:"base,omitempty"`             // github_file_diff, github_tree_comparison
	ExtensionID      string          `json:"extensionId,omitempty"`      // extension_context
	CanvasID         string          `json:"canvasId,omitempty"`         // extension_context
	InstanceID       string          `json:"instanceId,omitempty"`       // extension_context
	Payload          json.RawMessage `json:"payload,omitempty"`          // extension_context
	CapturedAt       *time.Time      `json:"capturedAt,omitempty"`       // extension_context
}

// AttachmentType tells the kinds of attachment apart.
type AttachmentType string

// The kinds of attachment.
const (
	AttachmentFile                 AttachmentType = "file"
	AttachmentDirectory            AttachmentType = "directory"
	AttachmentSelection            AttachmentType = "selection"
	AttachmentGitHubReference      AttachmentType = "github_reference"
	AttachmentGitHubCommit         AttachmentType = "github_commit"
	AttachmentGitHubRelease        AttachmentType = "github_release"
	AttachmentGitHubActionsJob     AttachmentType = "github_actions_job"
	AttachmentGitHubRepository     AttachmentType = "github_repository"
	AttachmentGitHubFileDiff       AttachmentType = "github_file_diff"
	AttachmentGitHubTreeComparison AttachmentType = "github_tree_comparison"
	AttachmentGitHubURL            AttachmentType = "github_url"
	AttachmentGitHubFile           AttachmentType = "github_file"
	AttachmentGitHubSnippet        AttachmentType = "github_snippet"
	AttachmentBlob                 AttachmentType = "blob"
	AttachmentExtensionContext     AttachmentType = "extension_context"
)

// LineRange is a range of lines, counted from 1, both ends included.
type LineRange struct {
	Start int `json:"start"`
	End   int `json:"end"`
}

// Selection is a range of text in a file.
type Selection struct {
	Start Position `json:"start"`
	End   Position `json:"end"`
}

// Position is a place in a file, line and character counted from 0.
type Position struct {
	Line      int `json:"line"`
	Character int `json:"character"`
}

// GitHubRepo names a repository on GitHub.
type GitHubRepo struct {
	ID    int64  `json:"id,omitempty"`
	Name  string `json:"name"`
	Owner string `json:"owner"`
}

// GitHubRevision is one side of a comparison: a file at a ref (github_file_diff), or a revision (github_tree_comparison).
type GitHubRevision struct {
	Repo     GitHubRepo `json:"repo"`
	Ref      string     `json:"ref,omitempty"`
	Path     string     `json:"path,omitempty"`
	Revision string     `json:"revision,omitempty"`
}

// SystemMessageEvent is prompt text that the model was given in the role of system or developer.
type SystemMessageEvent struct {
	Content       string          `json:"content"`
	ContentBlocks []SystemBlock   `json:"contentBlocks,omitempty"`
	InteractionID string          `json:"interactionId,omitempty"`
	Role          string          `json:"role"` // system, developer
	Name          string          `json:"name,omitempty"`
	Metadata      json.RawMessage `json:"metadata,omitempty"`
}

// SystemBlock is a piece of a SystemMessageEvent, cut for prompt caching.
type SystemBlock struct {
	Content         string `json:"content"`
	IsStatic        bool   `json:"isStatic,omitempty"`
	CacheBreakpoint bool   `json:"cacheBreakpoint,omitempty"`
}

// SystemNotification is a notice that the runtime put into the conversation.
type SystemNotification struct {
	Content            string                 `json:"content"`
	Kind               SystemNotificationKind `json:"kind"`
	ResponsesReasoning *ResponsesReasoning    `json:"responsesReasoning,omitempty"`
}

// SystemNotificationKind says what a SystemNotification is about. Type says which of the other fields count.
type SystemNotificationKind struct {
	// Type is agent_completed, agent_idle, new_inbox_message, shell_completed, shell_detached_completed,
	// instruction_discovered, workflow_completed or unclassified.
	Type              string          `json:"type"`
	AgentID           string          `json:"agentId,omitempty"`     // agent_*
	DisplayName       string          `json:"displayName,omitempty"` // agent_*
	AgentType         string          `json:"agentType,omitempty"`   // agent_*
	Status            string          `json:"status,omitempty"`      // agent_completed: completed, failed; workflow_completed: also halted, paused, cancelled, error
	Description       string          `json:"description,omitempty"` // agent_*, shell_*, instruction_discovered
	Prompt            string          `json:"prompt,omitempty"`      // agent_completed
	EntryID           string          `json:"entryId,omitempty"`     // new_inbox_message
	SenderName        string          `json:"senderName,omitempty"`  // new_inbox_message
	SenderType        string          `json:"senderType,omitempty"`  // new_inbox_message
	Summary           string          `json:"summary,omitempty"`     // new_inbox_message
	ShellID           string          `json:"shellId,omitempty"`     // shell_*
	ExitCode          *int            `json:"exitCode,omitempty"`    // shell_completed
	SourcePath        string          `json:"sourcePath,omitempty"`  // instruction_discovered
	TriggerFile       string          `json:"triggerFile,omitempty"` // instruction_discovered
	TriggerTool       string          `json:"triggerTool,omitempty"` // instruction_discovered
	RunID             string          `json:"runId,omitempty"`       // workflow_completed, as what follows
	WorkflowName      string          `json:"workflowName,omitempty"`
	ConsumedSubagents int64           `json:"consumedSubagents,omitempty"`
	ElapsedMs         int64           `json:"elapsedMs,omitempty"`
	ConsumedNanoAIU   int64           `json:"consumedNanoAiu,omitempty"`
	Attempt           int             `json:"attempt,omitempty"`
	ResultPreview     string          `json:"resultPreview,omitempty"`
	Failure           json.RawMessage `json:"failure,omitempty"`
	RetryGuidance     string          `json:"retryGuidance,omitempty"`
	PauseInfo         json.RawMessage `json:"pauseInfo,omitempty"`
	Metadata          json.RawMessage `json:"metadata,omitempty"` // unclassified
}

// AssistantTurnStart begins one round of model call and tools.
type AssistantTurnStart struct {
	TurnID           string `json:"turnId"` // a number, from "0" for each user message
	Model            string `json:"model,omitempty"`
	InteractionID    string `json:"interactionId,omitempty"`
	ParentToolCallID string `json:"parentToolCallId,omitempty"` // set in a sub-agent
}

// AssistantTurnEnd ends the round that began under the same TurnID.
type AssistantTurnEnd struct {
	TurnID           string `json:"turnId"`
	Model            string `json:"model,omitempty"`
	ParentToolCallID string `json:"parentToolCallId,omitempty"`
}

// AssistantIntent announces the agent's next step in a few words.
type AssistantIntent struct {
	Intent string `json:"intent"`
}

// AssistantMessageStart says that deltas of a message follow.
type AssistantMessageStart struct {
	MessageID string `json:"messageId"`
	Phase     string `json:"phase,omitempty"`
}

// AssistantMessageDelta adds to the message of the same id. The whole follows as [AssistantMessage], unless the model's stream breaks: then the
// server tries again, from the beginning and under another id.
type AssistantMessageDelta struct {
	MessageID        string `json:"messageId"`
	DeltaContent     string `json:"deltaContent"`
	ParentToolCallID string `json:"parentToolCallId,omitempty"`
}

// AssistantMessage is a whole message of the assistant: text, tool requests or both.
type AssistantMessage struct {
	MessageID            string          `json:"messageId"`
	OriginatingMessageID string          `json:"originatingMessageId,omitempty"` // what the Send that started the run returned
	Model                string          `json:"model,omitempty"`
	Content              string          `json:"content"`
	ToolRequests         []ToolRequest   `json:"toolRequests,omitempty"`
	ReasoningOpaque      string          `json:"reasoningOpaque,omitempty"` // encrypted
	ReasoningText        string          `json:"reasoningText,omitempty"`
	ReasoningWireField   string          `json:"reasoningWireField,omitempty"` // where the provider put its reasoning
	EncryptedContent     string          `json:"encryptedContent,omitempty"`
	Phase                string          `json:"phase,omitempty"`
	ChunkIndex           int             `json:"chunkIndex,omitempty"` // from 0, when one response comes as several messages
	ChunkCount           int             `json:"chunkCount,omitempty"` // how many; 0 when it was not split
	OutputTokens         int64           `json:"outputTokens,omitempty"`
	InteractionID        string          `json:"interactionId,omitempty"`
	RequestID            string          `json:"requestId,omitempty"`
	ClientRequestID      string          `json:"clientRequestId,omitempty"`
	ServiceRequestID     string          `json:"serviceRequestId,omitempty"`
	RTE                  bool            `json:"rte,omitempty"` // a signal of the API's response headers
	APICallID            string          `json:"apiCallId,omitempty"`
	ServerTools          json.RawMessage `json:"serverTools,omitempty"`
	ReasoningBlocks      json.RawMessage `json:"reasoningBlocks,omitempty"`
	TurnID               string          `json:"turnId,omitempty"`
	ParentToolCallID     string          `json:"parentToolCallId,omitempty"`
	Citations            json.RawMessage `json:"citations,omitempty"`
	Fusion               json.RawMessage `json:"fusion,omitempty"`
}

// ToolRequest is a tool call that the model asks for in an AssistantMessage.
type ToolRequest struct {
	ToolCallID       string          `json:"toolCallId"`
	Name             string          `json:"name"`
	Arguments        json.RawMessage `json:"arguments,omitempty"`
	Type             string          `json:"type,omitempty"` // function, custom
	ToolTitle        string          `json:"toolTitle,omitempty"`
	MCPServerName    string          `json:"mcpServerName,omitempty"`
	MCPToolName      string          `json:"mcpToolName,omitempty"`
	IntentionSummary string          `json:"intentionSummary,omitempty"`
	Caller           json.RawMessage `json:"caller,omitempty"`
}

// AssistantReasoning is a whole block of the model's reasoning.
type AssistantReasoning struct {
	ReasoningID string `json:"reasoningId"`
	Content     string `json:"content"`
	RTE         bool   `json:"rte,omitempty"`
}

// AssistantReasoningDelta adds to the reasoning block of the same id.
type AssistantReasoningDelta struct {
	ReasoningID  string `json:"reasoningId"`
	DeltaContent string `json:"deltaContent"`
}

// AssistantStreamingDelta says how much of a response has come so far.
type AssistantStreamingDelta struct {
	TotalResponseSizeBytes int64 `json:"totalResponseSizeBytes"`
}

// AssistantToolCallDelta adds to the input of a tool call that is still streaming.
type AssistantToolCallDelta struct {
	ToolCallID string `json:"toolCallId"`
	ToolName   string `json:"toolName,omitempty"`
	ToolType   string `json:"toolType,omitempty"` // function, custom
	InputDelta string `json:"inputDelta"`         // JSON text of a function, plain text of a custom tool
}

// AssistantUsage is what one model call used and how long it took.
type AssistantUsage struct {
	Model                    string                   `json:"model"`
	InputTokens              int64                    `json:"inputTokens,omitempty"`
	OutputTokens             int64                    `json:"outputTokens,omitempty"`
	CacheReadTokens          int64                    `json:"cacheReadTokens,omitempty"`
	CacheWriteTokens         int64                    `json:"cacheWriteTokens,omitempty"`
	CacheExpiresAt           *time.Time               `json:"cacheExpiresAt,omitempty"`
	ReasoningTokens          int64                    `json:"reasoningTokens,omitempty"`
	ThinkingDroppedBlocks    int64                    `json:"thinkingDroppedBlocks,omitempty"`
	ThinkingDroppedReasons   []string                 `json:"thinkingDroppedReasons,omitempty"`
	Cost                     float64                  `json:"cost,omitempty"`               // premium requests
	Duration                 int64                    `json:"duration,omitempty"`           // ms
	TimeToFirstTokenMs       float64                  `json:"timeToFirstTokenMs,omitempty"` // of streamed responses, as the next two
	OutputTTFTMs             float64                  `json:"outputTtftMs,omitempty"`       // ms to the first output, reasoning and tool calls included
	InterTokenLatencyMs      float64                  `json:"interTokenLatencyMs,omitempty"`
	Initiator                string                   `json:"initiator,omitempty"` // user, agent, sub-agent, mcp-sampling, ...
	InteractionType          string                   `json:"interactionType,omitempty"`
	IsBYOK                   bool                     `json:"isByok,omitempty"`
	IsAuto                   bool                     `json:"isAuto,omitempty"` // Auto chose the model
	MaxPromptTokens          int64                    `json:"maxPromptTokens,omitempty"`
	MaxOutputTokens          int64                    `json:"maxOutputTokens,omitempty"`
	AcceptedPredictionTokens int64                    `json:"acceptedPredictionTokens,omitempty"`
	RejectedPredictionTokens int64                    `json:"rejectedPredictionTokens,omitempty"`
	Transport                string                   `json:"transport,omitempty"` // http, websocket
	APICallID                string                   `json:"apiCallId,omitempty"`
	ProviderCallID           string                   `json:"providerCallId,omitempty"`
	ServiceRequestID         string                   `json:"serviceRequestId,omitempty"`
	RTE                      bool                     `json:"rte,omitempty"`
	APIEndpoint              string                   `json:"apiEndpoint,omitempty"` // /chat/completions, /v1/messages, /responses, ws:/responses
	ParentToolCallID         string                   `json:"parentToolCallId,omitempty"`
	QuotaSnapshots           map[string]QuotaSnapshot `json:"quotaSnapshots,omitempty"` // by quota id
	CopilotUsage             *CopilotUsage            `json:"copilotUsage,omitempty"`
	ReasoningEffort          string                   `json:"reasoningEffort,omitempty"`
	ReasoningSummary         string                   `json:"reasoningSummary,omitempty"`
	AvailableToolCount       int                      `json:"availableToolCount,omitempty"`
	ToolTokenCount           int64                    `json:"toolTokenCount,omitempty"`
	FrontierSource           string                   `json:"frontierSource,omitempty"`
	CacheTTLSeconds          int64                    `json:"cacheTtlSeconds,omitempty"`
	CacheDetailsReported     bool                     `json:"cacheDetailsReported,omitempty"`
	NumToolCalls             int                      `json:"numToolCalls,omitempty"`
	ToolCounts               map[string]int           `json:"toolCounts,omitempty"`   // calls by tool
	FinishReason             string                   `json:"finishReason,omitempty"` // stop, length, tool_calls, content_filter, ...
	ContentFilterTriggered   bool                     `json:"contentFilterTriggered,omitempty"`
	Fusion                   json.RawMessage          `json:"fusion,omitempty"`
	ModelDisplayName         string                   `json:"modelDisplayName,omitempty"`
	ProviderType             string                   `json:"providerType,omitempty"` // of a BYOK provider
}

// QuotaSnapshot is what is left of one quota.
type QuotaSnapshot struct {
	IsUnlimitedEntitlement           bool       `json:"isUnlimitedEntitlement"`
	EntitlementRequests              int64      `json:"entitlementRequests"` // -1 when unlimited
	UsedRequests                     int64      `json:"usedRequests"`
	UsageAllowedWithExhaustedQuota   bool       `json:"usageAllowedWithExhaustedQuota"`
	Overage                          float64    `json:"overage"` // requests beyond the quota
	OverageAllowedWithExhaustedQuota bool       `json:"overageAllowedWithExhaustedQuota"`
	RemainingPercentage              float64    `json:"remainingPercentage"`
	ResetDate                        *time.Time `json:"resetDate,omitempty"`
	HasQuota                         *bool      `json:"hasQuota,omitempty"`
	TokenBasedBilling                bool       `json:"tokenBasedBilling,omitempty"`
	OverageEntitlement               float64    `json:"overageEntitlement,omitempty"`
}

// ModelCallFailure says that a model call failed. The runtime may try again; a failure that ends the turn comes as
// SessionErrorEvent.
type ModelCallFailure struct {
	Model              string                   `json:"model,omitempty"`
	ParentToolCallID   string                   `json:"parentToolCallId,omitempty"`
	Initiator          string                   `json:"initiator,omitempty"`
	APICallID          string                   `json:"apiCallId,omitempty"`
	ProviderCallID     string                   `json:"providerCallId,omitempty"`
	ServiceRequestID   string                   `json:"serviceRequestId,omitempty"`
	RTE                bool                     `json:"rte,omitempty"`
	StatusCode         int                      `json:"statusCode,omitempty"` // HTTP
	DurationMs         int64                    `json:"durationMs,omitempty"`
	APIEndpoint        string                   `json:"apiEndpoint,omitempty"`
	Transport          string                   `json:"transport,omitempty"`
	FailureKind        string                   `json:"failureKind,omitempty"` // api, transport
	MaxPromptTokens    int64                    `json:"maxPromptTokens,omitempty"`
	MaxOutputTokens    int64                    `json:"maxOutputTokens,omitempty"`
	IsBYOK             bool                     `json:"isByok,omitempty"`
	IsAuto             bool                     `json:"isAuto,omitempty"`
	ReasoningEffort    string                   `json:"reasoningEffort,omitempty"`
	InteractionType    string                   `json:"interactionType,omitempty"`
	Source             string                   `json:"source"` // top_level, subagent, mcp_sampling
	ErrorMessage       string                   `json:"errorMessage,omitempty"`
	BadRequestKind     string                   `json:"badRequestKind,omitempty"` // bodyless, structured_error
	ErrorCode          string                   `json:"errorCode,omitempty"`
	ErrorType          string                   `json:"errorType,omitempty"`
	QuotaSnapshots     map[string]QuotaSnapshot `json:"quotaSnapshots,omitempty"`
	RequestFingerprint json.RawMessage          `json:"requestFingerprint,omitempty"` // counts of messages, tool calls, images
	Fusion             json.RawMessage          `json:"fusion,omitempty"`
	RetryAttempt       int                      `json:"retryAttempt,omitempty"`
}

// ToolUserRequested says that a tool was started by hand.
type ToolUserRequested struct {
	ToolCallID string          `json:"toolCallId"`
	ToolName   string          `json:"toolName"` // local_shell for a shell command
	Arguments  json.RawMessage `json:"arguments,omitempty"`
}

// ToolExecutionStart says that a tool call has begun.
type ToolExecutionStart struct {
	ToolCallID          string          `json:"toolCallId"`
	ToolName            string          `json:"toolName"`
	ToolTitle           string          `json:"toolTitle,omitempty"`
	Arguments           json.RawMessage `json:"arguments,omitempty"`
	ShellToolInfo       *ShellToolInfo  `json:"shellToolInfo,omitempty"`
	Model               string          `json:"model,omitempty"`
	RTE                 bool            `json:"rte,omitempty"`
	MCPServerName       string          `json:"mcpServerName,omitempty"`
	MCPConfigServerName string          `json:"mcpConfigServerName,omitempty"` // the server's key in the configuration
	MCPToolName         string          `json:"mcpToolName,omitempty"`
	MCPTransport        string          `json:"mcpTransport,omitempty"`    // as LoadedMCPServer.Transport
	MCPConfigSource     string          `json:"mcpConfigSource,omitempty"` // as LoadedMCPServer.Source
	TurnID              string          `json:"turnId,omitempty"`
	DisplayVerbatim     bool            `json:"displayVerbatim,omitempty"` // show the output unfolded
	ToolDescription     json.RawMessage `json:"toolDescription,omitempty"`
	ParentToolCallID    string          `json:"parentToolCallId,omitempty"`
	Fusion              json.RawMessage `json:"fusion,omitempty"`
}

// ShellToolInfo is what the runtime read from a shell command.
type ShellToolInfo struct {
	PossiblePaths           []string `json:"possiblePaths"`
	HasWriteFileRedirection bool     `json:"hasWriteFileRedirection"`
	DisplayCommand          string   `json:"displayCommand,omitempty"`
}

// ToolExecutionPartialResult is the next piece of a running tool's output. The server repeats a piece now and then.
type ToolExecutionPartialResult struct {
	ToolCallID    string `json:"toolCallId"`
	PartialOutput string `json:"partialOutput"`
}

// ToolExecutionProgress is a line about a running tool.
type ToolExecutionProgress struct {
	ToolCallID      string `json:"toolCallId"`
	ProgressMessage string `json:"progressMessage"`
}

// ToolExecutionComplete is the outcome of a tool call: Result on success, Error otherwise.
type ToolExecutionComplete struct {
	ToolCallID       string          `json:"toolCallId"`
	Success          bool            `json:"success"`
	Model            string          `json:"model,omitempty"`
	MCPMeta          json.RawMessage `json:"mcpMeta,omitempty"`
	InteractionID    string          `json:"interactionId,omitempty"`
	RTE              bool            `json:"rte,omitempty"`
	IsUserRequested  bool            `json:"isUserRequested,omitempty"`
	Result           *ToolOutput     `json:"result,omitempty"`
	Error            *ToolError      `json:"error,omitempty"`
	ToolTelemetry    json.RawMessage `json:"toolTelemetry,omitempty"`
	TurnID           string          `json:"turnId,omitempty"`
	ToolDescription  json.RawMessage `json:"toolDescription,omitempty"`
	Sandboxed        bool            `json:"sandboxed,omitempty"`
	ShellExecution   *ShellExecution `json:"shellExecution,omitempty"`
	ParentToolCallID string          `json:"parentToolCallId,omitempty"`
	Fusion           json.RawMessage `json:"fusion,omitempty"`
	FileEdits        []FileEdit      `json:"fileEdits,omitempty"`
}

// ToolOutput is what a tool call gave.
type ToolOutput struct {
	Content             string          `json:"content"`                   // for the model
	DetailedContent     string          `json:"detailedContent,omitempty"` // for the timeline
	Contents            []ToolContent   `json:"contents,omitempty"`
	BinaryResultsForLLM []ToolBinary    `json:"binaryResultsForLlm,omitempty"`
	UIResource          json.RawMessage `json:"uiResource,omitempty"`
	StructuredContent   json.RawMessage `json:"structuredContent,omitempty"`
	CitableSources      json.RawMessage `json:"citableSources,omitempty"`
	MCPMeta             json.RawMessage `json:"mcpMeta,omitempty"`
}

// ToolContent is one block of a tool's output. Type says which of the other fields count.
type ToolContent struct {
	Type            string          `json:"type"`                      // text, terminal, shell_exit, image, audio, resource_link, resource
	Text            string          `json:"text,omitempty"`            // text, terminal
	ExitCode        *int            `json:"exitCode,omitempty"`        // terminal, shell_exit
	CWD             string          `json:"cwd,omitempty"`             // terminal, shell_exit
	ShellID         string          `json:"shellId,omitempty"`         // shell_exit
	OutputPreview   string          `json:"outputPreview,omitempty"`   // shell_exit
	OutputTruncated bool            `json:"outputTruncated,omitempty"` // shell_exit
	OutputFilePath  string          `json:"outputFilePath,omitempty"`  // shell_exit
	Data            string          `json:"data,omitempty"`            // image, audio: standard base64
	MIMEType        string          `json:"mimeType,omitempty"`        // image, audio, resource_link
	Icons           json.RawMessage `json:"icons,omitempty"`           // resource_link
	Name            string          `json:"name,omitempty"`            // resource_link
	Title           string          `json:"title,omitempty"`           // resource_link
	URI             string          `json:"uri,omitempty"`             // resource_link
	Description     string          `json:"description,omitempty"`     // resource_link
	Size            int64           `json:"size,omitempty"`            // resource_link: bytes
	Resource        json.RawMessage `json:"resource,omitempty"`        // resource: uri, mimeType, and text or blob
}

// ToolBinary is an image or resource for the model: its data, a reference to it, or why it was left out.
type ToolBinary struct {
	Type          string          `json:"type"`           // image, resource
	Data          string          `json:"data,omitempty"` // standard base64
	MIMEType      string          `json:"mimeType"`
	AssetID       string          `json:"assetId,omitempty"` // of a session.binary_asset event
	ByteLength    int64           `json:"byteLength,omitempty"`
	OmittedReason string          `json:"omittedReason,omitempty"` // too_large, asset_unavailable
	Description   string          `json:"description,omitempty"`
	Metadata      json.RawMessage `json:"metadata,omitempty"`
}

// ToolError says why a tool call failed.
type ToolError struct {
	Message     string `json:"message"`
	Code        string `json:"code,omitempty"`        // failure, denied, rejected, timeout, ...
	Remediation string `json:"remediation,omitempty"` // as in SessionErrorEvent
}

// ShellExecution is the outcome of a shell command.
type ShellExecution struct {
	ExitCode int `json:"exitCode"`
}

// FileEdit is a file that a tool wrote.
type FileEdit struct {
	Path string `json:"path"`
	Kind string `json:"kind"` // create, ...
}

// PermissionRequested says that a permission has to be decided. SessionConfig.OnPermission answers it.
type PermissionRequested struct {
	RequestID         string          `json:"requestId"`
	PermissionRequest json.RawMessage `json:"permissionRequest"`
	PromptRequest     json.RawMessage `json:"promptRequest,omitempty"`  // the same, made ready for a user interface
	PermissionMode    string          `json:"permissionMode,omitempty"` // manual, assisted, allow-all
	AgentMode         AgentMode       `json:"agentMode,omitempty"`
	RiskAssessment    json.RawMessage `json:"riskAssessment,omitempty"`
	ResolvedByHook    bool            `json:"resolvedByHook,omitempty"` // a hook decided; nobody is to answer
	RecoveryEpisodeID string          `json:"recoveryEpisodeId,omitempty"`
	OwnerSessionID    string          `json:"ownerSessionId,omitempty"`
}

// PermissionCompleted says that a permission was decided, by whomever.
type PermissionCompleted struct {
	RequestID         string             `json:"requestId"`
	ToolCallID        string             `json:"toolCallId,omitempty"`
	RecoveryEpisodeID string             `json:"recoveryEpisodeId,omitempty"`
	Blocker           *PermissionBlocker `json:"blocker,omitempty"`
	Result            PermissionResult   `json:"result"`
	// DecisionSource is assisted_approval, human_response, host_policy, unattended_fallback or
	// authorization_carry_forward; "" does not mean that a human decided.
	DecisionSource string `json:"decisionSource,omitempty"`
}

// PermissionResult is how a permission was decided. Kind says which of the other fields count.
type PermissionResult struct {
	Kind                   PermissionResultKind `json:"kind"`
	ManagedApprovalHandled bool                 `json:"managedApprovalHandled,omitempty"` // approved*
	Approval               json.RawMessage      `json:"approval,omitempty"`               // approved-for-*: what is approved from now on
	LocationKey            string               `json:"locationKey,omitempty"`            // approved-for-location
	Reason                 string               `json:"reason,omitempty"`                 // cancelled
	Rules                  json.RawMessage      `json:"rules,omitempty"`                  // denied-by-rules
	Feedback               string               `json:"feedback,omitempty"`               // denied-interactively-by-user
	ForceReject            bool                 `json:"forceReject,omitempty"`            // denied-interactively-by-user
	Path                   string               `json:"path,omitempty"`                   // denied-by-content-exclusion-policy
	Message                string               `json:"message,omitempty"`                // denied-by-content-exclusion-policy, denied-by-permission-request-hook
	Interrupt              bool                 `json:"interrupt,omitempty"`              // denied-by-permission-request-hook
}

// PermissionResultKind tells the decisions on a permission apart.
type PermissionResultKind string

// The decisions on a permission.
const (
	PermissionApproved                 PermissionResultKind = "approved"
	PermissionApprovedForSession       PermissionResultKind = "approved-for-session"
	PermissionApprovedForLocation      PermissionResultKind = "approved-for-location"
	PermissionCancelled                PermissionResultKind = "cancelled"
	PermissionDeniedByRules            PermissionResultKind = "denied-by-rules"
	PermissionDeniedNobodyToAsk        PermissionResultKind = "denied-no-approval-rule-and-could-not-request-from-user"
	PermissionDeniedByUser             PermissionResultKind = "denied-interactively-by-user"
	PermissionDeniedByContentExclusion PermissionResultKind = "denied-by-content-exclusion-policy"
	PermissionDeniedByPermissionHook   PermissionResultKind = "denied-by-permission-request-hook"
)

// ExternalToolRequested asks the client that owns the tool to run it. Tool.Handler answers it.
type ExternalToolRequested struct {
	RequestID        string          `json:"requestId"`
	SessionID        string          `json:"sessionId"`
	ToolCallID       string          `json:"toolCallId"`
	ToolName         string          `json:"toolName"`
	ProviderID       string          `json:"providerId,omitempty"` // owner of an extension's tool
	Arguments        json.RawMessage `json:"arguments,omitempty"`
	WorkingDirectory string          `json:"workingDirectory,omitempty"`
	Traceparent      string          `json:"traceparent,omitempty"` // W3C trace context
	Tracestate       string          `json:"tracestate,omitempty"`
}

// ExternalToolCompleted says that an ExternalToolRequested was answered or cancelled.
type ExternalToolCompleted struct {
	RequestID string `json:"requestId"`
}

// UserInputRequested says that the agent asks the user something. SessionConfig.OnUserInput answers it.
type UserInputRequested struct {
	RequestID     string   `json:"requestId"`
	Question      string   `json:"question"`
	Choices       []string `json:"choices,omitempty"`
	AllowFreeform *bool    `json:"allowFreeform,omitempty"`
	ToolCallID    string   `json:"toolCallId,omitempty"`
}

// UserInputCompleted says that a UserInputRequested was answered or cancelled.
type UserInputCompleted struct {
	RequestID   string `json:"requestId"`
	Answer      string `json:"answer,omitempty"`
	WasFreeform bool   `json:"wasFreeform,omitempty"` // not one of the choices
}

// ElicitationRequested asks for a form to be filled or a page to be visited. SessionConfig.OnElicitation answers it.
type ElicitationRequested struct {
	RequestID         string          `json:"requestId"`
	ToolCallID        string          `json:"toolCallId,omitempty"`
	ElicitationSource string          `json:"elicitationSource,omitempty"` // an MCP server; "" for the agent or a client
	Message           string          `json:"message"`
	Mode              string          `json:"mode,omitempty"`            // form (also ""), url
	RequestedSchema   json.RawMessage `json:"requestedSchema,omitempty"` // form: a JSON schema
	URL               string          `json:"url,omitempty"`
	ElicitationID     string          `json:"elicitationId,omitempty"` // url
}

// ElicitationCompleted says that an ElicitationRequested was answered or cancelled.
type ElicitationCompleted struct {
	RequestID string          `json:"requestId"`
	Action    string          `json:"action,omitempty"`  // accept, decline, cancel
	Content   json.RawMessage `json:"content,omitempty"` // accept: the form's values
}

// ExitPlanModeRequested says that a plan waits for approval. SessionConfig.OnExitPlanMode answers it.
type ExitPlanModeRequested struct {
	RequestID         string   `json:"requestId"`
	Summary           string   `json:"summary"`
	PlanContent       string   `json:"planContent"`
	Actions           []string `json:"actions"` // exit_only, interactive, autopilot, autopilot_fleet
	RecommendedAction string   `json:"recommendedAction"`
	Model             string   `json:"model,omitempty"`
	ToolCallID        string   `json:"toolCallId,omitempty"`
}

// ExitPlanModeCompleted says how an ExitPlanModeRequested was decided.
type ExitPlanModeCompleted struct {
	RequestID        string `json:"requestId"`
	Approved         bool   `json:"approved,omitempty"`
	SelectedAction   string `json:"selectedAction,omitempty"`
	AutoApproveEdits bool   `json:"autoApproveEdits,omitempty"`
	Feedback         string `json:"feedback,omitempty"`
}

// AutoModeSwitchRequested asks whether the Auto model may take over. SessionConfig.OnAutoModeSwitch answers it.
type AutoModeSwitchRequested struct {
	RequestID         string `json:"requestId"`
	ErrorCode         string `json:"errorCode,omitempty"`
	RetryAfterSeconds int64  `json:"retryAfterSeconds,omitempty"` // seconds, though the schema says duration
}

// AutoModeSwitchCompleted says how an AutoModeSwitchRequested was decided.
type AutoModeSwitchCompleted struct {
	RequestID string `json:"requestId"`
	Response  string `json:"response"` // yes, yes_always, no
}

// CommandExecute asks the client that registered a slash command to run it. Command.Handler answers it.
type CommandExecute struct {
	RequestID   string `json:"requestId"`
	Command     string `json:"command"`     // the whole line, slash included
	CommandName string `json:"commandName"` // without the slash
	Args        string `json:"args"`        // the rest of the line
}

// CommandCompleted says that a CommandExecute was answered.
type CommandCompleted struct {
	RequestID string `json:"requestId"`
}

// MCPOAuthRequired says that an MCP server wants a token. SessionConfig.OnMCPAuth answers it.
type MCPOAuthRequired struct {
	RequestID               string          `json:"requestId"`
	ServerName              string          `json:"serverName"`
	ServerURL               string          `json:"serverUrl"`
	StaticClientConfig      json.RawMessage `json:"staticClientConfig,omitempty"` // may hold a client secret; do not log it
	WWWAuthenticateParams   json.RawMessage `json:"wwwAuthenticateParams,omitempty"`
	HTTPResponse            json.RawMessage `json:"httpResponse,omitempty"`     // what the server refused with: statusCode, headers, body
	ResourceMetadata        string          `json:"resourceMetadata,omitempty"` // JSON text (RFC 9728)
	Reason                  string          `json:"reason"`                     // initial, refresh, reauth, upscope
	RuntimeRefreshSupported bool            `json:"runtimeRefreshSupported,omitempty"`
}

// MCPOAuthCompleted says that an MCPOAuthRequired was answered or cancelled.
type MCPOAuthCompleted struct {
	RequestID string `json:"requestId"`
	Outcome   string `json:"outcome"` // token, cancelled
}

// SamplingRequested says that an MCP server wants to use the model.
type SamplingRequested struct {
	RequestID    string          `json:"requestId"`
	ServerName   string          `json:"serverName"`
	MCPRequestID json.RawMessage `json:"mcpRequestId"`      // a string or number
	Request      json.RawMessage `json:"request,omitempty"` // params of MCP's sampling/createMessage
}

// SamplingCompleted says that a SamplingRequested was answered or cancelled.
type SamplingCompleted struct {
	RequestID string `json:"requestId"`
}

// SubagentStarted says that a sub-agent was launched.
type SubagentStarted struct {
	ToolCallID           string `json:"toolCallId"` // the call that launched it
	AgentName            string `json:"agentName"`
	AgentDisplayName     string `json:"agentDisplayName"`
	AgentDescription     string `json:"agentDescription"`
	Model                string `json:"model,omitempty"`
	TaskModelSource      string `json:"taskModelSource,omitempty"`      // task_argument, subagent_configuration, custom_agent_definition, unset
	ModelSelectionSource string `json:"modelSelectionSource,omitempty"` // explicit_override, configured_required, session_inheritance, ...
	FactoryRunID         string `json:"factoryRunId,omitempty"`         // old name of WorkflowRunID
	WorkflowRunID        string `json:"workflowRunId,omitempty"`
	ParentID             string `json:"parentId,omitempty"` // task id of the sub-agent that launched it; "" for the main agent
	Resumable            bool   `json:"resumable,omitempty"`
	AgentType            string `json:"agentType,omitempty"`
	ExecutionMode        string `json:"executionMode,omitempty"`
}

// SubagentConfigured carries the model settings a sub-agent runs with.
type SubagentConfigured struct {
	Model           string `json:"model"`
	ReasoningEffort string `json:"reasoningEffort,omitempty"`
	ContextTier     string `json:"contextTier,omitempty"`
	MultiTurn       bool   `json:"multiTurn"`
}

// SubagentCompleted says that a sub-agent has ended.
type SubagentCompleted struct {
	SubagentRun
	Cancelled bool `json:"cancelled,omitempty"`
}

// SubagentFailed says that a sub-agent has failed.
type SubagentFailed struct {
	SubagentRun
	Error string `json:"error"`
}

// SubagentRun sums up the work of a sub-agent.
type SubagentRun struct {
	ToolCallID                     string `json:"toolCallId"`
	AgentName                      string `json:"agentName"`
	AgentDisplayName               string `json:"agentDisplayName"`
	Model                          string `json:"model,omitempty"`
	FirstDispatchedModel           string `json:"firstDispatchedModel,omitempty"`
	ConfiguredModelPreference      string `json:"configuredModelPreference,omitempty"`
	ExplicitModelOverride          string `json:"explicitModelOverride,omitempty"`
	ExplicitModelMatchesPreference *bool  `json:"explicitModelMatchesPreference,omitempty"`
	ModelOverrideReason            string `json:"modelOverrideReason,omitempty"`
	ModelSelectionSource           string `json:"modelSelectionSource,omitempty"` // as in SubagentStarted
	ConfiguredModelMatchesActual   *bool  `json:"configuredModelMatchesActual,omitempty"`
	TotalToolCalls                 int64  `json:"totalToolCalls,omitempty"`
	TotalTokens                    int64  `json:"totalTokens,omitempty"`
	DurationMs                     int64  `json:"durationMs,omitempty"`
}

// SubagentSelected says that a custom agent has taken the place of the default one.
type SubagentSelected struct {
	AgentName        string   `json:"agentName"`
	AgentDisplayName string   `json:"agentDisplayName"`
	Tools            []string `json:"tools"` // nil means all
}

// SubagentDeselected says that the default agent is back.
type SubagentDeselected struct{}

// HookStart says that a hook has begun.
type HookStart struct {
	HookInvocationID string          `json:"hookInvocationId"`
	HookType         string          `json:"hookType"`
	Input            json.RawMessage `json:"input,omitempty"`
	ParentToolCallID string          `json:"parentToolCallId,omitempty"`
}

// HookEnd says that the hook with the same HookInvocationID has ended.
type HookEnd struct {
	HookInvocationID string          `json:"hookInvocationId"`
	HookType         string          `json:"hookType"`
	Output           json.RawMessage `json:"output,omitempty"`
	Success          bool            `json:"success"`
	Error            *HookError      `json:"error,omitempty"`
	ParentToolCallID string          `json:"parentToolCallId,omitempty"`
}

// HookError says why a hook failed.
type HookError struct {
	Message string `json:"message"`
	Stack   string `json:"stack,omitempty"`
	Source  string `json:"source,omitempty"`
}

// HookProgress is a line about a running hook.
type HookProgress struct {
	Message   string `json:"message"`
	Temporary bool   `json:"temporary,omitempty"` // the next line may take its place
}

// SkillInvoked says that a skill entered the conversation.
type SkillInvoked struct {
	Name                   string   `json:"name"`
	InvokedAtTurn          *int     `json:"invokedAtTurn,omitempty"`
	Model                  string   `json:"model,omitempty"`
	Path                   string   `json:"path"` // "" for a client's skill
	Content                string   `json:"content"`
	AllowedTools           []string `json:"allowedTools,omitempty"`
	DisableModelInvocation bool     `json:"disableModelInvocation,omitempty"`
	Source                 string   `json:"source,omitempty"` // as LoadedSkill.Source, also remote
	PluginName             string   `json:"pluginName,omitempty"`
	PluginVersion          string   `json:"pluginVersion,omitempty"`
	Description            string   `json:"description,omitempty"`
	Trigger                string   `json:"trigger,omitempty"` // user-invoked, agent-invoked, context-load
}

// Abort says that the turn was aborted. Both idle events follow.
type Abort struct {
	Reason string `json:"reason"` // user_initiated, remote_command, user_abort, autopilot_credit_limit
}

// SessionCanvasOpened says that a canvas was opened, or changed if InstanceID is known already.
//
// Experimental: it may change or go with any release of the runtime.
type SessionCanvasOpened struct {
	InstanceID    string          `json:"instanceId"`
	ExtensionID   string          `json:"extensionId"`
	ExtensionName string          `json:"extensionName,omitempty"`
	CanvasID      string          `json:"canvasId"`
	Icon          string          `json:"icon,omitempty"`
	Title         string          `json:"title,omitempty"`
	Status        string          `json:"status,omitempty"`
	URL           string          `json:"url,omitempty"`
	Input         json.RawMessage `json:"input,omitempty"`
}

// SessionCanvasClosed says that a canvas was closed.
//
// Experimental: it may change or go with any release of the runtime.
type SessionCanvasClosed struct {
	InstanceID  string `json:"instanceId"`
	ExtensionID string `json:"extensionId"`
	CanvasID    string `json:"canvasId"`
}

// newPayload returns a new payload for events of type t, nil when there is no payload type.
func newPayload(t EventType) Payload {
	switch t {
	case EventSessionStart:
		return new(SessionStart)
	case EventSessionResume:
		return new(SessionResume)
	case EventSessionIdle:
		return new(SessionIdle)
	case EventAssistantIdle:
		return new(AssistantIdle)
	case EventSessionError:
		return new(SessionErrorEvent)
	case EventSessionInfo:
		return new(SessionInfoEvent)
	case EventSessionWarning:
		return new(SessionWarning)
	case EventSessionTitleChanged:
		return new(SessionTitleChanged)
	case EventSessionModelChange:
		return new(SessionModelChange)
	case EventSessionModeChanged:
		return new(SessionModeChanged)
	case EventSessionUsageInfo:
		return new(SessionUsageInfo)
	case EventSessionCompactionStart:
		return new(SessionCompactionStart)
	case EventSessionCompactionComplete:
		return new(SessionCompactionComplete)
	case EventSessionTaskComplete:
		return new(SessionTaskComplete)
	case EventSessionSnapshotRewind:
		return new(SessionSnapshotRewind)
	case EventSessionShutdown:
		return new(SessionShutdown)
	case EventSessionContextChanged:
		return new(SessionContextChanged)
	case EventSessionPlanChanged:
		return new(SessionPlanChanged)
	case EventSessionWorkspaceFileChanged:
		return new(SessionWorkspaceFileChanged)
	case EventSessionToolsUpdated:
		return new(SessionToolsUpdated)
	case EventSessionSkillsLoaded:
		return new(SessionSkillsLoaded)
	case EventSessionMCPServersLoaded:
		return new(SessionMCPServersLoaded)
	case EventSessionMCPServerStatusChanged:
		return new(SessionMCPServerStatusChanged)
	case EventCapabilitiesChanged:
		return new(CapabilitiesChanged)
	case EventCommandsChanged:
		return new(CommandsChanged)
	case EventUserMessage:
		return new(UserMessage)
	case EventSystemMessage:
		return new(SystemMessageEvent)
	case EventSystemNotification:
		return new(SystemNotification)
	case EventAssistantTurnStart:
		return new(AssistantTurnStart)
	case EventAssistantTurnEnd:
		return new(AssistantTurnEnd)
	case EventAssistantIntent:
		return new(AssistantIntent)
	case EventAssistantMessageStart:
		return new(AssistantMessageStart)
	case EventAssistantMessageDelta:
		return new(AssistantMessageDelta)
	case EventAssistantMessage:
		return new(AssistantMessage)
	case EventAssistantReasoning:
		return new(AssistantReasoning)
	case EventAssistantReasoningDelta:
		return new(AssistantReasoningDelta)
	case EventAssistantStreamingDelta:
		return new(AssistantStreamingDelta)
	case EventAssistantToolCallDelta:
		return new(AssistantToolCallDelta)
	case EventAssistantUsage:
		return new(AssistantUsage)
	case EventModelCallFailure:
		return new(ModelCallFailure)
	case EventToolUserRequested:
		return new(ToolUserRequested)
	case EventToolExecutionStart:
		return new(ToolExecutionStart)
	case EventToolExecutionPartialResult:
		return new(ToolExecutionPartialResult)
	case EventToolExecutionProgress:
		return new(ToolExecutionProgress)
	case EventToolExecutionComplete:
		return new(ToolExecutionComplete)
	case EventPermissionRequested:
		return new(PermissionRequested)
	case EventPermissionCompleted:
		return new(PermissionCompleted)
	case EventExternalToolRequested:
		return new(ExternalToolRequested)
	case EventExternalToolCompleted:
		return new(ExternalToolCompleted)
	case EventUserInputRequested:
		return new(UserInputRequested)
	case EventUserInputCompleted:
		return new(UserInputCompleted)
	case EventElicitationRequested:
		return new(ElicitationRequested)
	case EventElicitationCompleted:
		return new(ElicitationCompleted)
	case EventExitPlanModeRequested:
		return new(ExitPlanModeRequested)
	case EventExitPlanModeCompleted:
		return new(ExitPlanModeCompleted)
	case EventAutoModeSwitchRequested:
		return new(AutoModeSwitchRequested)
	case EventAutoModeSwitchCompleted:
		return new(AutoModeSwitchCompleted)
	case EventCommandExecute:
		return new(CommandExecute)
	case EventCommandCompleted:
		return new(CommandCompleted)
	case EventMCPOAuthRequired:
		return new(MCPOAuthRequired)
	case EventMCPOAuthCompleted:
		return new(MCPOAuthCompleted)
	case EventSamplingRequested:
		return new(SamplingRequested)
	case EventSamplingCompleted:
		return new(SamplingCompleted)
	case EventSubagentStarted:
		return new(SubagentStarted)
	case EventSubagentConfigured:
		return new(SubagentConfigured)
	case EventSubagentCompleted:
		return new(SubagentCompleted)
	case EventSubagentFailed:
		return new(SubagentFailed)
	case EventSubagentSelected:
		return new(SubagentSelected)
	case EventSubagentDeselected:
		return new(SubagentDeselected)
	case EventHookStart:
		return new(HookStart)
	case EventHookEnd:
		return new(HookEnd)
	case EventHookProgress:
		return new(HookProgress)
	case EventSkillInvoked:
		return new(SkillInvoked)
	case EventAbort:
		return new(Abort)
	case EventSessionCanvasOpened:
		return new(SessionCanvasOpened)
	case EventSessionCanvasClosed:
		return new(SessionCanvasClosed)
	}
	return nil
}

func (*RawPayload) payload()                    {}
func (*SessionStart) payload()                  {}
func (*SessionResume) payload()                 {}
func (*SessionIdle) payload()                   {}
func (*AssistantIdle) payload()                 {}
func (*SessionErrorEvent) payload()             {}
func (*SessionInfoEvent) payload()              {}
func (*SessionWarning) payload()                {}
func (*SessionTitleChanged) payload()           {}
func (*SessionModelChange) payload()            {}
func (*SessionModeChanged) payload()            {}
func (*SessionUsageInfo) payload()              {}
func (*SessionCompactionStart) payload()        {}
func (*SessionCompactionComplete) payload()     {}
func (*SessionTaskComplete) payload()           {}
func (*SessionSnapshotRewind) payload()         {}
func (*SessionShutdown) payload()               {}
func (*SessionContextChanged) payload()         {}
func (*SessionPlanChanged) payload()            {}
func (*SessionWorkspaceFileChanged) payload()   {}
func (*SessionToolsUpdated) payload()           {}
func (*SessionSkillsLoaded) payload()           {}
func (*SessionMCPServersLoaded) payload()       {}
func (*SessionMCPServerStatusChanged) payload() {}
func (*CapabilitiesChanged) payload()           {}
func (*CommandsChanged) payload()               {}
func (*UserMessage) payload()                   {}
func (*SystemMessageEvent) payload()            {}
func (*SystemNotification) payload()            {}
func (*AssistantTurnStart) payload()            {}
func (*AssistantTurnEnd) payload()              {}
func (*AssistantIntent) payload()               {}
func (*AssistantMessageStart) payload()         {}
func (*AssistantMessageDelta) payload()         {}
func (*AssistantMessage) payload()              {}
func (*AssistantReasoning) payload()            {}
func (*AssistantReasoningDelta) payload()       {}
func (*AssistantStreamingDelta) payload()       {}
func (*AssistantToolCallDelta) payload()        {}
func (*AssistantUsage) payload()                {}
func (*ModelCallFailure) payload()              {}
func (*ToolUserRequested) payload()             {}
func (*ToolExecutionStart) payload()            {}
func (*ToolExecutionPartialResult) payload()    {}
func (*ToolExecutionProgress) payload()         {}
func (*ToolExecutionComplete) payload()         {}
func (*PermissionRequested) payload()           {}
func (*PermissionCompleted) payload()           {}
func (*ExternalToolRequested) payload()         {}
func (*ExternalToolCompleted) payload()         {}
func (*UserInputRequested) payload()            {}
func (*UserInputCompleted) payload()            {}
func (*ElicitationRequested) payload()          {}
func (*ElicitationCompleted) payload()          {}
func (*ExitPlanModeRequested) payload()         {}
func (*ExitPlanModeCompleted) payload()         {}
func (*AutoModeSwitchRequested) payload()       {}
func (*AutoModeSwitchCompleted) payload()       {}
func (*CommandExecute) payload()                {}
func (*CommandCompleted) payload()              {}
func (*MCPOAuthRequired) payload()              {}
func (*MCPOAuthCompleted) payload()             {}
func (*SamplingRequested) payload()             {}
func (*SamplingCompleted) payload()             {}
func (*SubagentStarted) payload()               {}
func (*SubagentConfigured) payload()            {}
func (*SubagentCompleted) payload()             {}
func (*SubagentFailed) payload()                {}
func (*SubagentSelected) payload()              {}
func (*SubagentDeselected) payload()            {}
func (*HookStart) payload()                     {}
func (*HookEnd) payload()                       {}
func (*HookProgress) payload()                  {}
func (*SkillInvoked) payload()                  {}
func (*Abort) payload()                         {}
func (*SessionCanvasOpened) payload()           {}
func (*SessionCanvasClosed) payload()           {}
