package copilot

// This file is how a session begins: its configuration, and the one path on which create and resume start.
//
// Its one idea: everything that can be decided is decided before a byte is written, and a start that does not succeed undoes exactly what
// it did, here and on the server.

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"sync/atomic"
)

// PreparedSession is a session that has been validated and allocated, and not started: nothing has been written and nothing is
// registered. Subscriptions taken from it see every event that is routed to the session, from the first. One that is not started may simply be
// dropped.
//
// Where the server chooses the id (SessionConfig.Cloud without SessionID), what it sends before its answer cannot be routed
// and is lost; giving an id closes that hole.
type PreparedSession struct {
	session *Session
	id      string
	method  string
	config  *encodedConfig
	state   atomic.Int32 // prepared, then started or given up
}

const (
	prepared int32 = iota
	started
	givenUp
)

// PrepareSession validates cfg, nil for defaults, and prepares a new session. Nothing of cfg is kept by reference. Errors match ErrInvalidConfig.
func (c *Client) PrepareSession(cfg *SessionConfig) (*PreparedSession, error) {
	id := ""
	switch {
	case cfg == nil || cfg.SessionID == "" && cfg.Cloud == nil:
		id = newUUID()
	default:
		id = cfg.SessionID
	}
	return c.prepare(startCreate, "session.create", id, cfg)
}

// PrepareResumeSession is [Client.PrepareSession] for the stored session with this id. cfg.SessionID must be empty or equal to it.
func (c *Client) PrepareResumeSession(id string, cfg *SessionConfig) (*PreparedSession, error) {
	if id == "" {
		return nil, fmt.Errorf("%w: resume needs a session id", ErrInvalidConfig)
	}
	return c.prepare(startResume, "session.resume", id, cfg)
}

func (c *Client) prepare(kind startKind, method, id string, cfg *SessionConfig) (*PreparedSession, error) {
	if cfg == nil {
		cfg = &SessionConfig{}
	}
	if cfg.GitHubTokenProvider != nil && cfg.GitHubTokenProviderRegistrationID == "" {
		registered := *cfg
		registered.GitHubTokenProviderRegistrationID = newUUID()
		cfg = &registered
	}
	encoded, err := cfg.encode(kind, id, c.opts)
	if err != nil {
		return nil, err
	}
	s := newSession(c, id, kind, cfg)
	if s.hosted, err = c.hosting(id, cfg); err != nil {
		return nil, err
	}
	return &PreparedSession{session: s, id: id, method: method, config: encoded}, nil
}

// SessionID returns the id that the session will have, "" when the server will choose it.
func (p *PreparedSession) SessionID() string { return p.id }

// Subscribe returns a subscription that begins with the next event, which is the first one before Start.
func (p *PreparedSession) Subscribe() *Subscription[Event] { return p.session.Subscribe() }

// Events subscribes, now, and returns the sequence of events, see [Session.Events].
func (p *PreparedSession) Events(ctx context.Context) iter.Seq2[Event, error] {
	return p.session.Events(ctx)
}

// Close gives the prepared session up: its subscriptions end cleanly. It does nothing once Start has been called.
func (p *PreparedSession) Close() error {
	if p.state.CompareAndSwap(prepared, givenUp) {
		p.session.end(ErrClosed)
	}
	return nil
}

// CreateSession is [Client.PrepareSession] and [PreparedSession.Start].
func (c *Client) CreateSession(ctx context.Context, cfg *SessionConfig) (*Session, error) {
	p, err := c.PrepareSession(cfg)
	if err != nil {
		return nil, err
	}
	return p.Start(ctx)
}

// ResumeSession is [Client.PrepareResumeSession] and [PreparedSession.Start].
func (c *Client) ResumeSession(ctx context.Context, id string, cfg *SessionConfig) (*Session, error) {
	p, err := c.PrepareResumeSession(id, cfg)
	if err != nil {
		return nil, err
	}
	return p.Start(ctx)
}

// phase is how far a session has come. It is guarded by Client.mu.
type phase int

const (
	starting phase = iota // registered, or about to be
	open
	leaving // its release has been asked for
)

// start is the server's view of a session that is being started. It is guarded by Client.mu.
type start struct {
	ctx       context.Context
	abandoned bool // ctx ended before the answer came
	accepted  bool // the server has a session under this id, by this start or an abandoned one before it
}

// Start creates or resumes the session. It works once: later calls return ErrAlreadyStarted, after Close ErrClosed. An id that this client
// has open already, or is starting or leaving, is refused with ErrSessionOpen. ctx bounds the start only.
//
// When it fails, for whatever reason, nothing is left: subscriptions end with the cause, the id can be used again at once, and if the server
// has the session, now or by an answer that comes late, it is released in the background. Errors are a [*SessionError] around the
// cause: [*RPCError] (which may match ErrSessionNotFound, ErrCannotResume or ErrAuthentication), [*SessionIDMismatchError], ctx's error, or
// the connection's end.
func (p *PreparedSession) Start(ctx context.Context) (*Session, error) {
	s := p.session
	if !p.state.CompareAndSwap(prepared, started) {
		if p.state.Load() == givenUp {
			return nil, ErrClosed
		}
		return nil, ErrAlreadyStarted
	}
	s.start = &start{ctx: ctx}
	err := p.run(ctx)
	if err == nil {
		return s, nil
	}
	return nil, s.client.retire(s, err)
}

func (p *PreparedSession) run(ctx context.Context) error {
	s, c := p.session, p.session.client
	if err := c.reserve(ctx, s); err != nil {
		return err
	}
	params := c.withTrace(ctx, p.config.params)
	raw, err := c.do(ctx, &call{method: p.method, then: s.answered, until: s.ctx.Done()}, params)
	if cause := s.failure(); cause != nil && errors.Is(err, ErrClosed) {
		return cause
	}
	if err != nil {
		return err
	}
	if err := s.opened(raw); err != nil {
		return err
	}
	if err := p.followUp(ctx); err != nil {
		return err
	}
	c.mu.Lock()
	owner := c.routes[s.id].session == s && s.phase == starting
	if owner {
		s.phase, s.start = open, nil
	}
	c.mu.Unlock()
	if owner {
		return nil
	}
	select {
	case <-ctx.Done(): // another start took its place while the last answer was on its way
		return contextError(ctx)
	case <-s.ctx.Done(): // it is being ended
		return s.failure()
	}
}

// reserve makes s the owner of its id. A start whose ctx has ended gives way; a release of the id that is under way is awaited,
// since the server works on requests concurrently.
func (c *Client) reserve(ctx context.Context, s *Session) error {
	for {
		if ctx.Err() != nil {
			return contextError(ctx)
		}
		c.mu.Lock()
		if err := c.ending(); err != nil {
			c.mu.Unlock()
			return err
		}
		owner := c.routes[s.id]
		switch {
		case s.id == "": // routed by answered
		case owner.session == s:
		case owner.watch != nil, owner.session != nil && !owner.session.givesWay():
			c.mu.Unlock()
			return ErrSessionOpen
		default:
			if owner.session != nil && owner.session.start.accepted {
				s.start.accepted, owner.session.start.accepted = true, false // what it leaves on the server is ours to use or to release
			}
			c.routes[s.id] = route{session: s}
		}
		pending := c.releases[s.id]
		if pending == nil {
			s.live = true
			c.registerLocked(s)
			c.mu.Unlock()
			return nil
		}
		c.mu.Unlock()
		_ = pending.wait(ctx) // refused or not, the server is done with it
	}
}

// ending is why nothing new can begin, nil while it can. What is registered under the c.mu under which that was asked is found by the end.
func (c *Client) ending() error {
	if err := c.conn.failure(); err != nil {
		return err
	}
	if c.stopping.Load() {
		return ErrClosed
	}
	return nil
}

// givesWay reports whether a start has been given up by its caller, even if that has not returned yet.
func (s *Session) givesWay() bool { return s.phase == starting && s.start.ctx.Err() != nil }

// answered runs on the reader when the server has answered the start, before the next frame is read.
func (s *Session) answered(raw json.RawMessage, err error) {
	if err != nil {
		return
	}
	s.adopt(raw)
	c := s.client
	c.mu.Lock()
	defer c.mu.Unlock()
	id := unquote(member(raw, "sessionId"))
	if id == "" {
		id = s.id
	}
	switch owner := c.routes[id]; {
	case id == "":
	case owner == (route{}) && s.id == "" && !s.start.abandoned && c.ending() == nil:
		s.id, s.start.accepted = id, true
		c.routes[id] = route{session: s}
	case owner == (route{}), owner.session != nil && owner.session.phase == leaving: // nobody is left who wants it
		c.releaseLocked(id, "session.destroy")
		c.log.Debug("copilot: releasing what a start left on the server")
	case owner.session != nil && owner.session.phase == starting:
		owner.session.start.accepted = true // ours, or started again meanwhile: that start's to use or to release
	}
}

// startAnswer is what the server says of a session that it has opened.
type startAnswer struct {
	WorkspacePath       string          `json:"workspacePath"`
	RemoteURL           string          `json:"remoteUrl"`
	Capabilities        json.RawMessage `json:"capabilities"`
	OpenCanvases        []OpenCanvas    `json:"openCanvases"`
	OpenCanvasInstances []OpenCanvas    `json:"openCanvasInstances"` // its name in old servers
}

// adopt takes over what the answer says, on the reader: the events behind it may change that again.
func (s *Session) adopt(raw json.RawMessage) {
	var a startAnswer
	if json.Unmarshal(raw, &a) != nil {
		return // opened reports it
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.workspacePath, s.remoteURL = a.WorkspacePath, a.RemoteURL
	s.capabilities.merge(a.Capabilities)
	for _, canvas := range append(a.OpenCanvases, a.OpenCanvasInstances...) {
		s.putCanvasLocked(canvas)
	}
}

// opened checks the answer of the server.
func (s *Session) opened(raw json.RawMessage) error {
	var a startAnswer
	if err := json.Unmarshal(raw, &a); err != nil {
		return fmt.Errorf("copilot: the answer to a start: %w", clipped{err})
	}
	switch id := member(raw, "sessionId"); {
	case id == nil && s.kind == startResume: // servers from before it was sent
	case unquote(id) == "":
		return errors.New("copilot: the answer to a start has no session id")
	case s.id == "": // answered did not take it
		return cmp.Or(s.client.ending(), ErrSessionOpen)
	case unquote(id) != s.id:
		return &SessionIDMismatchError{Requested: s.id, Returned: unquote(id)}
	}
	return nil
}

// followUp sends the requests that complete a start. None is sent after one that failed.
func (p *PreparedSession) followUp(ctx context.Context) error {
	s := p.session
	if s.host.mcpAuth != nil {
		params := map[string]string{"eventType": string(EventMCPOAuthRequired)}
		if _, err := s.call(ctx, "session.eventLog.registerInterest", params, nil); err != nil {
			return err
		}
	}
	if p.config.update != nil {
		_, err := s.call(ctx, "session.options.update", p.config.update, nil)
		return err
	}
	return nil
}

// retire undoes a start that did not succeed: it removes the route that this start installed, and no other, and releases what the
// server may have. It returns the error of the start.
func (c *Client) retire(s *Session, cause error) error {
	c.mu.Lock()
	cause = s.errorFor(cause)
	s.start.abandoned = true
	if c.routes[s.id].session == s {
		delete(c.routes, s.id)
	}
	if s.start.accepted && s.phase == starting && c.routes[s.id] == (route{}) {
		c.releaseLocked(s.id, "session.destroy")
	}
	c.mu.Unlock()
	if errors.Is(cause, ErrClosed) {
		s.end(ErrClosed) // a clean one for who reads
	} else {
		s.end(cause)
	}
	return cause
}

// release is a session.destroy or sessions.close on its way. It belongs to the client, not to a caller.
type release struct {
	id    string
	again string // guarded by Client.mu: the method to send once more
	done  chan struct{}
	err   error // valid after done
}

// wait returns nil when the server has let go.
func (r *release) wait(ctx context.Context) error {
	select {
	case <-r.done:
		return r.err
	case <-ctx.Done():
		return fmt.Errorf("%w: %w", errUnanswered, contextError(ctx))
	}
}

// releaseLocked begins the release of an id. Where one is under way it is followed by another, since the server may have worked on that before
// it made what is to be released now. c.mu is held.
func (c *Client) releaseLocked(id, method string) *release {
	if r := c.releases[id]; r != nil {
		r.again = method
		return r
	}
	r := &release{id: id, done: make(chan struct{})}
	c.releases[id] = r
	go c.runRelease(r, method) // owned by the client; ends with the answer or the connection
	return r
}

func (c *Client) runRelease(r *release, method string) {
	for method != "" {
		_, r.err = c.callAlways(context.Background(), method, map[string]string{"sessionId": r.id}, nil)
		if errors.Is(r.err, ErrSessionNotFound) { // like success: false: it is gone already
			r.err = nil
		}
		c.mu.Lock()
		if method, r.again = r.again, ""; method == "" {
			delete(c.releases, r.id)
		}
		c.mu.Unlock()
	}
	close(r.done)
}

// withSession adds the session id to the params of a call. Params must be a JSON object, or nothing, and name no other session.
func withSession(id string, params any) (json.RawMessage, error) {
	raw := json.RawMessage("{}")
	if params != nil {
		var err error
		if raw, err = marshal(params); err != nil {
			return nil, fmt.Errorf("%w: params: %w", ErrInvalidConfig, err)
		}
	}
	s := scanner{b: raw}
	switch {
	case string(raw) == "null":
		raw = json.RawMessage("{}")
	case s.peek() != '{':
		return nil, fmt.Errorf("%w: params of a session's call must be an object", ErrInvalidConfig)
	}
	if named := member(raw, "sessionId"); named != nil {
		if unquote(named) != id {
			return nil, fmt.Errorf("%w: params name another session", ErrInvalidConfig)
		}
		return raw, nil
	}
	return splice(raw, "sessionId", id), nil
}

// splice adds a string member at the front of a JSON object.
func splice(object json.RawMessage, name, value string) json.RawMessage {
	s := scanner{b: object}
	s.peek()
	rest := object[s.i+1:]
	b := append(make([]byte, 0, len(object)+len(name)+len(value)+16), '{')
	b = append(appendQuoted(b, name), ':')
	b = appendQuoted(b, value)
	if inner := (scanner{b: rest}); inner.peek() != '}' {
		b = append(b, ',')
	}
	return append(b, rest...)
}

// withTrace adds the W3C trace context of a call: what Options.TraceContext says or, without it, that of the handler which makes the call.
func (c *Client) withTrace(ctx context.Context, params json.RawMessage) json.RawMessage {
	get := c.opts.TraceContext
	if get == nil {
		get = TraceContextFrom
	}
	parent, state := get(ctx)
	if state != "" {
		params = splice(params, "tracestate", state)
	}
	if parent != "" {
		params = splice(params, "traceparent", parent)
	}
	return params
}

// newUUID returns a random UUID, version 4.
func newUUID() string {
	var b [16]byte
	if _, err := rand.Read(b[:]); err != nil {
		panic(err) // crypto/rand: the system has no randomness, nothing can go on
	}
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}
