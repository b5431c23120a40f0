package copilot

// This file decides which session a message belongs to, and runs what the host was asked to do.
//
// Its one idea: the reader parses, routes and publishes, in wire order, and never waits; whatever may take time, a handler's
// call above all, runs on a goroutine of its own under a context that ends with its reason to run.

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
)

// route is where the messages of one session id go: to a session, or to a watch.
type route struct {
	session *Session
	watch   *SharedSessionWatch
}

func (r route) end(cause error) {
	if r.watch != nil {
		r.watch.end(cause)
		return
	}
	r.session.end(cause)
}

// release asks the server to let go of what the route holds; nil when there is nothing on the server yet.
func (r route) release() *release {
	if r.watch != nil {
		return r.watch.release()
	}
	return r.session.leave()
}

// lookup returns the route for a raw session id of the wire.
func (c *Client) lookup(raw []byte) (r route) {
	if len(raw) < 2 || raw[0] != '"' {
		return r
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	r, ok := c.routes[string(raw[1:len(raw)-1])]
	if !ok {
		r = c.routes[unquote(raw)] // with escapes, which ids have no need of
	}
	if r.session != nil && !r.session.live {
		return route{} // what comes now belongs to an earlier session of that id
	}
	return r
}

// dispatch gets every request and notification, on the reader, in wire order.
func (c *Client) dispatch(m *message) {
	switch {
	case m.id != nil:
		c.serve(m)
	case string(m.method) == `"session.event"`:
		c.event(m)
	case string(m.method) == `"session.lifecycle"`:
		c.lifecycleNotice(m)
	default:
		c.notice(unquote(m.method), m)
	}
}

// event publishes a session event. Events of sessions that are not open here are dropped.
func (c *Client) event(m *message) {
	if m.event == nil || m.event[0] != '{' {
		c.log.Debug("copilot: dropped a session event without an event")
		return
	}
	switch r := c.lookup(m.sessionID); {
	case r.watch != nil:
		r.watch.deliver(newEvent(&m.fields, c.types))
	case r.session != nil:
		r.session.deliver(newEvent(&m.fields, c.types))
	}
}

// notice serves a notification other than events: by name, or not at all.
func (c *Client) notice(method string, m *message) {
	if method == "gitHubTelemetry.event" && c.opts.OnGitHubTelemetry != nil {
		c.host.telemetry.push(c, m.params)
		return
	}
	s := c.lookup(m.sessionID).session
	if h := c.custom(s, method); h != nil {
		t := c.task(s, &c.agentWork, "")
		params := m.params
		t.start(func() {
			protect(c.log, func() (any, error) { return h(t.ctx, method, params) }, func(any, error) {})
		})
	}
}

// custom returns the host's handler for a method that this package does not serve itself.
func (c *Client) custom(s *Session, method string) HandlerFunc {
	if s != nil {
		if h := s.custom[method]; h != nil {
			return h
		}
	}
	return c.opts.Handlers[method]
}

// serve answers a request of the server: by a handler on a goroutine of its own, or at once when there is nothing to run.
func (c *Client) serve(m *message) {
	method := unquote(m.method)
	if method == "" {
		c.conn.replyNow(m.id, nil, &RPCError{Code: codeInvalidRequest, Message: "method is missing"})
		return
	}
	s := c.lookup(m.sessionID).session
	h := c.custom(s, method)
	if h == nil && c.serveHost(s, method, m) {
		return
	}
	if h == nil {
		c.conn.replyNow(m.id, nil, &RPCError{Code: codeMethodNotFound, Message: "method not found: " + method})
		return
	}
	id, params := m.id, m.params
	t := c.task(s, &c.agentWork, "request "+string(id))
	t.start(func() {
		protect(c.log, func() (any, error) { return h(t.ctx, method, params) },
			func(result any, err error) { c.answer(id, result, err) })
	})
}

// answer sends a handler's outcome. Only the end of the connection keeps it from the server.
func (c *Client) answer(id []byte, result any, err error) {
	var refusal *RPCError
	if err != nil && !errors.As(err, &refusal) {
		refusal = &RPCError{Code: codeInternal, Message: err.Error()}
	}
	if err := c.conn.reply(id, result, refusal); err != nil {
		c.log.Debug("copilot: an answer was not sent", "error", err)
	}
}

// task is one handler call in flight.
type task struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
	set    *tasks
	key    string
	work   *limiter
}

// tasks are the handler calls in flight for one session, or for the client where none is concerned.
type tasks struct {
	mu    sync.Mutex
	byKey map[string]*task
}

// task makes the context of a handler call. key names the request, so that its completion elsewhere can be told.
func (c *Client) task(s *Session, work *limiter, key string) *task {
	t := &task{work: work, key: key}
	parent := c.ctx
	if s != nil {
		parent, t.set = s.ctx, &s.tasks
	}
	t.ctx, t.cancel = context.WithCancelCause(parent)
	return t
}

// start runs f on a goroutine of its own, in order under the class's limit.
func (t *task) start(f func()) {
	if t.set != nil {
		t.set.add(t)
	}
	t.work.run(func() {
		defer t.finish()
		f()
	})
}

func (t *task) finish() {
	if t.set != nil {
		t.set.remove(t)
	}
	t.cancel(nil)
}

func (s *tasks) add(t *task) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.byKey == nil {
		s.byKey = make(map[string]*task)
	}
	s.byKey[t.key] = t
}

func (s *tasks) remove(t *task) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.byKey[t.key] == t {
		delete(s.byKey, t.key)
	}
}

// cancelAll ends the contexts of all calls in flight.
func (s *tasks) cancelAll(cause error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range s.byKey {
		t.cancel(cause)
	}
}

// limiter runs functions on goroutines of their own, at most max at once. Further ones wait in order, without a goroutine.
type limiter struct {
	max     int
	mu      sync.Mutex
	running int
	waiting []func()
}

func (l *limiter) run(f func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.running == l.max {
		l.waiting = append(l.waiting, f)
		return
	}
	l.running++
	go l.work(f) // owned by the client; ends with f. Nobody waits for it: f may be the one that stops the client
}

func (l *limiter) work(f func()) {
	defer l.next() // deferred, since f may end the goroutine with runtime.Goexit
	f()
}

func (l *limiter) next() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.waiting) == 0 {
		l.running--
		return
	}
	f := l.waiting[0]
	l.waiting[0] = nil
	l.waiting = l.waiting[1:]
	go l.work(f) // as in run
}

// errPanic is what a handler that panicked or called runtime.Goexit is answered with; the details go to the log.
var errPanic = errors.New("the host's handler panicked")

// protect calls host code and hands its outcome to answer, once, also when it panics or ends its goroutine.
func protect[T any](log *slog.Logger, f func() (T, error), answer func(T, error)) {
	var v T
	err := errPanic
	defer func() {
		if p := recover(); p != nil {
			log.Error("copilot: a handler panicked", "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
		}
		answer(v, err)
	}()
	v, err = f()
}

// decodeParams unmarshals a request's params; its error is the one that the server gets.
func decodeParams(params json.RawMessage, v any) *RPCError {
	if len(params) == 0 || string(params) == "null" {
		params = json.RawMessage("{}")
	}
	if err := json.Unmarshal(params, v); err != nil {
		return &RPCError{Code: codeInvalidParams, Message: "params: " + err.Error()}
	}
	return nil
}
