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

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
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
