package copilot

// This file is for looking on: watches of sessions that somebody else runs, and the life of sessions on the server.
//
// Its one idea: a watch can be read and closed, and nothing else; there is no way through it to act on the session.

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"time"
)

const (
	defaultEventBuffer = 512
	watchBuffer        = 8192
	lifecycleBuffer    = 512
)

// LifecycleType is what happened to a session. Servers may send types that have no constant here.
type LifecycleType string

// The lifecycle types that are known.
const (
	SessionCreated      LifecycleType = "session.created"
	SessionUpdated      LifecycleType = "session.updated"
	SessionDeleted      LifecycleType = "session.deleted"
	SessionForeground   LifecycleType = "session.foreground"
	SessionBackground   LifecycleType = "session.background"
	SessionDisconnected LifecycleType = "session.disconnected" // a watched session has ended
)

// LifecycleEvent is a notice about any session of the server, open here or not. The server may send one twice.
type LifecycleEvent struct {
	Type         LifecycleType
	SessionID    string
	StartTime    time.Time // zero, like the following, where the server sent no metadata
	ModifiedTime time.Time
	Summary      string
}

// SubscribeLifecycle returns a subscription to the notices that follow. It holds up to 512 unread ones.
func (c *Client) SubscribeLifecycle() *Subscription[LifecycleEvent] { return c.lifecycle.subscribe() }

// Lifecycle subscribes, now, and returns the sequence of the notices that follow. The subscription ends with the loop or with ctx; the sequence can
// be ranged once.
func (c *Client) Lifecycle(ctx context.Context) iter.Seq2[LifecycleEvent, error] {
	return c.SubscribeLifecycle().once(ctx)
}

// lifecycleNotice publishes a notice, on the reader, and ends what it says has ended.
func (c *Client) lifecycleNotice(m *message) {
	e := LifecycleEvent{Type: LifecycleType(unquote(member(m.params, "type"))), SessionID: unquote(m.sessionID)}
	var metadata struct {
		StartTime    json.RawMessage `json:"startTime"`
		ModifiedTime json.RawMessage `json:"modifiedTime"`
		Summary      json.RawMessage `json:"summary"`
	}
	if json.Unmarshal(member(m.params, "metadata"), &metadata) == nil {
		_ = json.Unmarshal(metadata.StartTime, &e.StartTime) // zero when it cannot be read
		_ = json.Unmarshal(metadata.ModifiedTime, &e.ModifiedTime)
		e.Summary = unquote(metadata.Summary)
	}
	switch r := c.lookup(m.sessionID); {
	case e.Type == SessionDeleted && r.session != nil:
		r.session.end(r.session.errorFor(ErrSessionNotFound))
	case e.Type == SessionDisconnected && r.watch != nil:
		r.watch.end(ErrDisconnected)
	}
	c.lifecycle.publish(e)
}

// RemoteSessionMetadata describes a session that runs elsewhere.
type RemoteSessionMetadata struct {
	SessionID         string           `json:"sessionId"`
	Kind              string           `json:"kind"` // "remote-session" or "coding-agent"
	Name              string           `json:"name"`
	Summary           string           `json:"summary"`
	StartTime         time.Time        `json:"startTime"`
	ModifiedTime      time.Time        `json:"modifiedTime"`
	Repository        RemoteRepository `json:"repository"`
	PullRequestNumber int              `json:"pullRequestNumber"` // 0 when there is none
	ResourceID        string           `json:"resourceId"`
	StaleAt           string           `json:"staleAt"`
	State             string           `json:"state"`
}

// RemoteRepository is the repository that a remote session works on.
type RemoteRepository struct {
	Owner  string `json:"owner"`
	Name   string `json:"name"`
	Branch string `json:"branch"`
}

// WatchOptions configures a watch. The zero value and nil are valid.
type WatchOptions struct {
	EventBuffer int // events the watch holds for its reader; 0 means 8,192
}

// SharedSessionWatch is a read-only view of a session that somebody else runs: its history from the beginning, then what happens. It never
// answers what the session asks its clients. Its methods may be called from any goroutine; one consumer at a time.
//
// Experimental: servers that do not know shared sessions answer [Client.WatchSharedSession] with ErrNotSupported.
type SharedSessionWatch struct {
	client   *Client
	id       string
	metadata RemoteSessionMetadata
	ring     *ring[Event]
	sub      *Subscription[Event]

	releasing *release // guarded by client.mu; not nil once Close or Stop has asked the server
}

var errNotReadOnly = errors.New("copilot: the server did not grant a read-only watch")

// WatchSharedSession begins to watch the session with this id. The id of the watch may be another one; see
// [SharedSessionWatch.SessionID]. The replay of its history is complete: the watch buffers from before its first event. ctx bounds the call only.
// Errors: ErrInvalidConfig; ErrNotSupported when the server does not know shared sessions; ErrSessionOpen when this client has the session
// open; [*RPCError]; ctx's error. What the server had begun is closed again.
//
// Experimental: see [SharedSessionWatch].
func (c *Client) WatchSharedSession(ctx context.Context, id string, opts *WatchOptions) (*SharedSessionWatch, error) {
	size := watchBuffer
	if opts != nil && opts.EventBuffer != 0 {
		size = opts.EventBuffer
	}
	if id == "" || size < 0 {
		return nil, fmt.Errorf("%w: a watch needs a session id, and EventBuffer must not be negative", ErrInvalidConfig)
	}
	c.mu.Lock()
	pending := c.releases[id]
	c.mu.Unlock()
	if pending != nil { // the server works on requests concurrently
		_ = pending.wait(ctx) // the call looks at ctx itself
	}
	w := &SharedSessionWatch{client: c, ring: newRing[Event](size)}
	w.sub = w.ring.subscribe()
	var registration error
	var abandoned bool // guarded by c.mu
	raw, err := c.call(ctx, "sessions.watch", map[string]string{"sessionId": id}, func(raw json.RawMessage, err error) {
		if err == nil { // on the reader: the replay begins with the next frame
			registration = c.registerWatch(w, raw, &abandoned)
		}
	})
	if err != nil {
		c.mu.Lock()
		abandoned = true
		c.mu.Unlock()
		w.discard(err)
		return nil, &SessionError{SessionID: id, Err: err}
	}
	if registration == nil {
		registration = w.opened(raw)
	}
	if registration != nil {
		w.discard(registration)
		return nil, &SessionError{SessionID: id, Err: registration}
	}
	return w, nil
}

// registerWatch installs the watch's route, or closes the watch at once when its caller has gone.
func (c *Client) registerWatch(w *SharedSessionWatch, raw json.RawMessage, abandoned *bool) error {
	id := unquote(member(raw, "sessionId"))
	if id == "" {
		return errors.New("copilot: result of sessions.watch has no session id")
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.routes[id] != (route{}) {
		return ErrSessionOpen
	}
	if err := c.ending(); err != nil || *abandoned {
		c.releaseLocked(id, "sessions.close")
		return err
	}
	w.id = id
	c.routes[id] = route{watch: w}
	return nil
}

// opened takes over the answer of the server.
func (w *SharedSessionWatch) opened(raw json.RawMessage) error {
	if string(member(raw, "readOnly")) != "true" {
		return errNotReadOnly
	}
	return decodeResult("sessions.watch", member(raw, "metadata"), &w.metadata)
}

// discard undoes a watch that is not handed out.
func (w *SharedSessionWatch) discard(cause error) {
	w.release()
	w.end(cause)
}

// SessionID returns the id under which the server sends the watched session's events.
func (w *SharedSessionWatch) SessionID() string { return w.id }

// Metadata returns what the server said of the session when the watch began, as a copy.
func (w *SharedSessionWatch) Metadata() RemoteSessionMetadata { return w.metadata }

// ReadOnly returns true: a watch that is not read-only is refused.
func (w *SharedSessionWatch) ReadOnly() bool { return true }

// Events returns the sequence of the watch's events that were not read yet, from the first of its replay on, see [Subscription.All]. A reader that falls
// more than WatchOptions.EventBuffer behind gets a [*LagError]. The last pair is ErrDisconnected when the session has ended, or the
// connection's end; none after Close and Stop.
func (w *SharedSessionWatch) Events(ctx context.Context) iter.Seq2[Event, error] {
	return w.sub.All(ctx)
}

// Close ends the watch and tells the server, once; nothing is sent when the session had disconnected before. It returns nil when the server has
// let go. When ctx ends first, the release goes on in the background.
func (w *SharedSessionWatch) Close(ctx context.Context) error {
	r := w.release()
	if r == nil {
		return nil
	}
	err := r.wait(ctx)
	w.end(ErrClosed)
	if err != nil {
		return &SessionError{SessionID: w.id, Err: err}
	}
	return nil
}

func (w *SharedSessionWatch) deliver(e Event) { w.ring.publish(e) }

// end ends the watch, once, and removes its route: nothing is sent for it from then on.
func (w *SharedSessionWatch) end(cause error) {
	c := w.client
	c.mu.Lock()
	if c.routes[w.id].watch == w {
		delete(c.routes, w.id)
	}
	c.mu.Unlock()
	w.ring.end(sequenceEnd(cause))
}

// release asks the server to close the watch, once; nil when there is nothing to close.
func (w *SharedSessionWatch) release() *release {
	c := w.client
	c.mu.Lock()
	defer c.mu.Unlock()
	if w.releasing == nil && c.routes[w.id].watch == w {
		w.releasing = c.releaseLocked(w.id, "sessions.close")
	}
	return w.releasing
}
