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
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
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
	return r.session.leave(errStopping)
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
		c.conn.log.Debug("copilot: dropped a session event without an event")
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
	switch {
	case method == "$/cancelRequest":
		c.cancelRequest(member(m.params, "id"))
		return
	case method == "gitHubTelemetry.event" && c.opts.OnGitHubTelemetry != nil:
		c.host.telemetry.push(c, m.params)
		return
	}
	s := c.lookup(m.sessionID).session
	if h := c.custom(s, method); h != nil {
		params := m.params
		j := job{run: func(ctx context.Context) (any, error) { return h(ctx, method, params) }}
		c.newTask(s, j, "").start(func(any, error) {})
	}
}

// custom returns the host's own handler for a method, which goes before this package's.
func (c *Client) custom(s *Session, method string) HandlerFunc {
	if s != nil {
		if h := s.host.custom[method]; h != nil {
			return h
		}
	}
	return c.opts.Handlers[method]
}

// serve answers a request of the server: by a handler on a goroutine of its own, or at once when there is nothing to run.
func (c *Client) serve(m *message) {
	id, method, params := m.id, unquote(m.method), m.params
	if method == "" {
		c.conn.replyNow(id, nil, &RPCError{Code: codeInvalidRequest, Message: "method is missing"})
		return
	}
	s := c.lookup(m.sessionID).session
	var j job
	if h := c.custom(s, method); h != nil {
		j.run = func(ctx context.Context) (any, error) { return h(ctx, method, params) }
	} else if strings.HasPrefix(method, "llmInference.httpRequest") {
		c.serveModel(s, method, m)
		return
	} else if request := c.directRequest(method); request == nil {
		c.conn.replyNow(id, nil, &RPCError{Code: codeMethodNotFound, Message: "method not found: " + clip(method)})
		return
	} else if s == nil && method != "gitHubToken.getToken" {
		c.conn.replyNow(id, nil, &RPCError{Code: codeInvalidParams, Message: "no such session here"})
		return
	} else {
		j = request(s, params)
	}
	if j.run == nil {
		result, err := j.reply(nil, errNoHandler)
		c.conn.replyNow(id, result, refusal(err))
		return
	}
	sets := []*tasks{&c.requests}
	if s != nil {
		sets = append(sets, &s.tasks)
	}
	c.newTask(s, j, requestKey(id), sets...).start(func(result any, err error) {
		if j.reply != nil {
			result, err = j.reply(result, err)
		}
		if err := c.conn.reply(id, result, refusal(err)); err != nil {
			c.log.Debug("copilot: an answer was not sent", "error", err)
		}
	})
}

// refusal is the error answer for a handler's error: the handler's own where it is one.
func refusal(err error) *RPCError {
	var rpc *RPCError
	var params *paramsError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &rpc):
		return rpc
	case errors.As(err, &params):
		return &RPCError{Code: codeInvalidParams, Message: clip(err.Error())}
	}
	return &RPCError{Code: codeInternal, Message: err.Error()}
}

// cancelRequest ends the context of a direct request in flight and answers it. What its handler says later is dropped.
func (c *Client) cancelRequest(id []byte) {
	if t := c.requests.get(requestKey(id)); t != nil && t.settle() {
		t.cancel(errCancelled)
		c.conn.replyNow(id, nil, &RPCError{Code: codeCancelled, Message: "cancelled"})
	}
}

func requestKey(id []byte) string { return "request " + string(id) }

// Why the contexts of handlers end, besides ErrAborted and the end of session or client; and why one has no result.
var (
	errResolved   = errors.New("copilot: the request was resolved elsewhere")
	errCancelled  = errors.New("copilot: the server cancelled the request")
	errLeaving    = fmt.Errorf("%w: the session is being released", ErrClosed)
	errStopping   = fmt.Errorf("%w: the client is being stopped", ErrClosed)
	errNoHandler  = errors.New("no handler")
	errPanic      = errors.New("the host's handler panicked")
	errRefused    = errors.New("the server did not accept the host's answer")
	errFlood      = fmt.Errorf("copilot: the server asks without end: %d handler calls wait", maxWaiting)
	errBadHandler = errors.New("the host's handler gave no valid answer")
)

// scope is what, besides its own resolution and the end of its session or client, ends the context of a handler call.
type scope int

const (
	sessionScope scope = iota // the session's release, as soon as that is asked for
	turnScope                 // that, and an abort of the turn
	serviceScope              // nothing: the server needs it until it has released the session
)

// job is what a request of the server, or an event that asks for an answer, wants of the host.
type job struct {
	host     bool      // of the class of calls that the server needs before it can answer others
	scope    scope     // what ends its context
	agent    string    // the sub-agent it is for, "" for the main agent
	observer EventType // for a direct request, the event that tells its end; "" when there is none
	// run calls the host's code; nil when the host has none for this.
	run func(ctx context.Context) (any, error)
	// reply makes the answer of what run returned: the result of a direct request, or the params of the call that answers an
	// event, where nil answers nothing. A nil reply leaves it as it is.
	reply func(result any, err error) (any, error)
}

// task is one handler call, from being asked for to the return of the handler.
type task struct {
	job
	client  *Client
	session *Session // nil when none is concerned
	key     string   // names it in the sets
	sets    []*tasks // where it can be found while it is in flight
	ctx     context.Context
	cancel  context.CancelCauseFunc
	settled atomic.Bool
}

func (c *Client) newTask(s *Session, j job, key string, sets ...*tasks) *task {
	t := &task{job: j, client: c, session: s, key: key, sets: sets}
	parent := c.ctx
	if s != nil {
		parent = s.ctx
	}
	t.ctx, t.cancel = context.WithCancelCause(parent)
	return t
}

// settle reports, once, that the answer is the caller's to give.
func (t *task) settle() bool { return !t.settled.Swap(true) }

// start runs the task on a goroutine of its own, in order under its class's limit. done gets the outcome unless the task was settled
// meanwhile.
func (t *task) start(done func(result any, err error)) {
	c := t.client
	for _, set := range t.sets {
		set.add(t)
	}
	work := &c.agentWork
	if t.host {
		work = &c.hostWork
	}
	if !work.run(func() {
		defer t.finish()
		protect(c, func() (any, error) {
			if t.ctx.Err() != nil { // it has lost its reason while it waited
				return nil, context.Cause(t.ctx)
			}
			return t.run(t.ctx)
		}, func(result any, err error) {
			if err != nil && t.ctx.Err() == nil {
				c.log.Warn("copilot: a handler failed", "error", c.mask(clip(err.Error()), nil))
			}
			if !t.settle() {
				return
			}
			if t.observer != "" && t.ctx.Err() == nil {
				t.session.tasks.expect(t.observer)
			}
			done(result, err)
		})
	}) {
		t.finish()
		c.conn.fail(errFlood)
	}
}

func (t *task) finish() {
	for _, set := range t.sets {
		set.remove(t)
	}
	t.cancel(nil)
}

// tasks are handler calls in flight: those of a session, or the direct requests to the client.
type tasks struct {
	mu       sync.Mutex
	byKey    map[string]*task
	recent   []string          // keys of events that were dealt with lately
	expected map[EventType]int // events that tell the end of requests which we have answered ourselves
}

const maxRecent = 128

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

func (s *tasks) get(key string) *task {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.byKey[key]
}

// first reports whether this key is new, and remembers it. Servers and transports may repeat themselves.
func (s *tasks) first(key string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.byKey[key] != nil || slices.Contains(s.recent, key) {
		return false
	}
	if len(s.recent) == maxRecent {
		s.recent = append(s.recent[:0], s.recent[1:]...)
	}
	s.recent = append(s.recent, key)
	return true
}

// resolve ends a task that was answered elsewhere. Its handler's answer is dropped.
func (s *tasks) resolve(key string) {
	if t := s.get(key); t != nil {
		t.settle()
		t.cancel(errResolved)
	}
}

// expect notes that the server will tell of a request's end because of our answer.
func (s *tasks) expect(observer EventType) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.expected == nil {
		s.expected = make(map[EventType]int)
	}
	s.expected[observer]++
}

// observe takes an event that tells the end of a direct request without naming it. Unless that was our own doing it ends the context of the
// one such request in flight; where there are several, nobody can tell. The request itself still wants its answer.
func (s *tasks) observe(observer EventType) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.expected[observer] > 0 {
		s.expected[observer]--
		return
	}
	var found []*task
	for _, t := range s.byKey {
		if t.observer == observer {
			found = append(found, t)
		}
	}
	if len(found) == 1 {
		found[0].cancel(errResolved)
	}
}

// ofTurn returns the tasks that an abort by this agent ends; the main agent's ends those of all agents.
func (s *tasks) ofTurn(agent string) (found []*task) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range s.byKey {
		if t.scope == turnScope && (agent == "" || agent == t.agent) {
			found = append(found, t)
		}
	}
	return found
}

// release ends the contexts that a session's release ends.
func (s *tasks) release(cause error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range s.byKey {
		if t.scope != serviceScope {
			t.cancel(cause)
		}
	}
}

func cancelTasks(list []*task, cause error) {
	for _, t := range list {
		t.cancel(cause)
	}
}

const maxWaiting = 65536 // handler calls of one class that wait, beyond those that run

// limiter runs functions on goroutines of their own, at most max at once. Further ones wait in order, without a goroutine.
type limiter struct {
	max     int
	mu      sync.Mutex
	running int
	waiting []func()
}

// run reports false, and does nothing, when too many wait already.
func (l *limiter) run(f func()) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.running < l.max {
		l.running++
		go l.work(f) // owned by the client; ends with f. Nobody waits for it: f may be the one that stops the client
		return true
	}
	if len(l.waiting) == maxWaiting {
		return false
	}
	l.waiting = append(l.waiting, f)
	return true
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

// protect calls host code and hands its outcome to done, once, also when it panics or ends its goroutine.
func protect[T any](c *Client, f func() (T, error), done func(T, error)) {
	var result T
	err := errPanic
	returned := false
	defer func() {
		if !returned {
			why := "runtime.Goexit"
			if p := recover(); p != nil {
				why = fmt.Sprint(p)
			}
			c.log.Error("copilot: a handler panicked", "panic", c.mask(clip(why), nil), "stack", string(debug.Stack()))
		}
		done(result, err)
	}()
	result, err = f()
	returned = true
}

// clip cuts a text that others made to what an error may quote.
func clip(s string) string {
	if len(s) <= maxQuote {
		return s
	}
	return strings.ToValidUTF8(s[:maxQuote], "") + "..."
}

// paramsError says that the params of a request, or the data of an event, do not fit.
type paramsError struct{ err error }

func (e *paramsError) Error() string { return "params: " + e.err.Error() }
func (e *paramsError) Unwrap() error { return e.err }

// decodeParams unmarshals what came with a request. Absent and null count as an empty object.
func decodeParams(params json.RawMessage, v any) error {
	if len(params) == 0 || string(params) == "null" {
		params = json.RawMessage("{}")
	}
	if err := json.Unmarshal(params, v); err != nil {
		return &paramsError{err}
	}
	return nil
}
