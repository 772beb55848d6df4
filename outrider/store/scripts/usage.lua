-- What one API key uses. All operations, since they share the arithmetic.
-- KEYS, in one hash slot: 1 buckets (hash: level and time of each), 2 places (zset: ticket by expiry ms), 3 holdings (hash:
-- ticket to the tokens set aside for it, session to its last ticket).
-- ARGV: 1 operation, 2 ticket (session/nonce; '' for a call that generates nothing), 3 ms a place is held without renewal,
-- 4 tokens, then the limits, 0 for none: 5 requests per minute, 6 concurrent, 7 tokens per minute, 8 tokens per day.
local MINUTE, DAY = 60000, 86400000
local now = now_ms()
local operation, ticket, hold_ms, amount = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local concurrent = tonumber(ARGV[6])
local REQUESTS = {name = 'requests_per_minute', limit = tonumber(ARGV[5]), period = MINUTE}
local TOKENS = {
  {name = 'tokens_per_minute', limit = tonumber(ARGV[7]), period = MINUTE},
  {name = 'tokens_per_day', limit = tonumber(ARGV[8]), period = DAY},
}

-- How full a bucket is by now: it fills evenly, up to its limit, and is below 0 while more was taken than there was.
local function level(bucket)
  local stored = redis.call('HMGET', KEYS[1], bucket.name .. '.level', bucket.name .. '.ms')
  if not stored[1] then
    return bucket.limit
  end
  local gained = math.max(0, now - tonumber(stored[2])) * bucket.limit / bucket.period
  return math.min(bucket.limit, tonumber(stored[1]) + gained)
end

local function take(bucket, count)
  if bucket.limit > 0 then
    local left = math.min(bucket.limit, level(bucket) - count)
    redis.call('HSET', KEYS[1], bucket.name .. '.level', string.format('%.17g', left), bucket.name .. '.ms', integer(now))
  end
end

local function take_tokens(count)
  for _, bucket in ipairs(TOKENS) do
    take(bucket, count)
  end
end

local function session_of(id)
  return string.match(id, '^(.*)/')
end

local function leave(id, unused)
  if redis.call('ZREM', KEYS[2], id) == 1 then
    take_tokens(-unused)
  end
  redis.call('HDEL', KEYS[3], id)
  if redis.call('HGET', KEYS[3], session_of(id)) == id then
    redis.call('HDEL', KEYS[3], session_of(id))
  end
end

-- A ticket that nobody renews belongs to a process that is gone: its place is free, and what it had set aside goes back.
local function forget_the_lost()
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', integer(now), 'LIMIT', 0, 1000)) do
    leave(id, tonumber(redis.call('HGET', KEYS[3], id) or '0'))
  end
end

local function hold()
  redis.call('ZADD', KEYS[2], integer(now + hold_ms), ticket)
end

-- Ms until a bucket holds more than `wanted`; 0 if it does.
local function wait_for(bucket, wanted)
  if bucket.limit == 0 then
    return 0
  end
  return math.max(0, math.ceil((wanted - level(bucket)) * bucket.period / bucket.limit))
end

local function worst_of_tokens()
  local name, wait = '', 0
  for _, bucket in ipairs(TOKENS) do
    local needed = wait_for(bucket, 1)
    if needed > wait then
      name, wait = bucket.name, needed
    end
  end
  return name, wait
end

-- A session that is resumed takes its own place over: what held it is about to end.
local function is_full()
  if concurrent == 0 or ticket == '' then
    return false
  end
  local taken = redis.call('ZCARD', KEYS[2])
  local before = redis.call('HGET', KEYS[3], session_of(ticket))
  if before and operation == 'resume' and redis.call('ZSCORE', KEYS[2], before) then
    taken = taken - 1
  end
  return taken >= concurrent
end

local function enter()
  if ticket ~= '' and redis.call('ZSCORE', KEYS[2], ticket) then
    return {'OK'}
  end
  local name, wait = REQUESTS.name, wait_for(REQUESTS, 1)
  if ticket ~= '' then
    local other, longer = worst_of_tokens()
    if longer > wait then
      name, wait = other, longer
    end
  end
  if wait > 0 then
    return {'LIMIT', name, wait}
  end
  if is_full() then
    return {'LIMIT', 'concurrent', 0}
  end
  take(REQUESTS, 1)
  if ticket ~= '' then
    hold()
    redis.call('HSET', KEYS[3], session_of(ticket), ticket)
  end
  return {'OK'}
end

local function reserve()
  if redis.call('HEXISTS', KEYS[3], ticket) == 1 then
    return {'OK'}
  end
  local name, wait = worst_of_tokens()
  if wait > 0 then
    return {'LIMIT', name, wait}
  end
  if redis.call('ZSCORE', KEYS[2], ticket) then
    take_tokens(amount)
    redis.call('HSET', KEYS[3], ticket, integer(amount))
    hold()
  end
  return {'OK'}
end

-- Never brings a place back that was given up or ran out.
local function renew()
  if redis.call('ZSCORE', KEYS[2], ticket) then
    hold()
    if redis.call('HEXISTS', KEYS[3], ticket) == 1 then
      redis.call('HSET', KEYS[3], ticket, integer(amount))
    end
  end
  return {'OK'}
end

-- All is forgotten when every bucket would be full again and every place free.
local function expire()
  local wait = 2 * hold_ms
  for _, bucket in ipairs({REQUESTS, TOKENS[1], TOKENS[2]}) do
    wait = math.max(wait, wait_for(bucket, bucket.limit))
  end
  for i = 1, #KEYS do
    redis.call('PEXPIRE', KEYS[i], integer(wait + MINUTE))
  end
end

forget_the_lost()
local reply
if operation == 'enter' or operation == 'resume' then
  reply = enter()
elseif operation == 'reserve' then
  reply = reserve()
elseif operation == 'renew' then
  reply = renew()
else
  leave(ticket, amount)
  reply = {'OK'}
end
expire()
return reply
